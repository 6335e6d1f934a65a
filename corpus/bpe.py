"""Byte-pair encoding of one's own text: the most frequent pair of neighbors becomes a token, again
and again (Sennrich et al. 2016; on bytes: Radford et al. 2019).

    l o w   l o w e r   n e w e r        "e r" is here twice, as is "l o" before: the lowest ids win
    lo w    lo w e r    n e w e r        then "lo w": each new token is a pair of earlier ones

A word is what GPT-2's pattern finds; pairs do not cross words. So each different word is merged
once, whatever its count, and a merge visits only the words that hold its pair.
"""
import heapq
from collections import Counter, defaultdict

MOST_CHARACTERS = 256       # of a word: what is longer is no word, and slow to merge


def count_words(texts) -> Counter:
    """How often each word occurs in the texts."""
    import regex            # with tiktoken, whose pattern needs it
    from tiktoken_ext.openai_public import r50k_pat_str
    pattern = regex.compile(r50k_pat_str)
    words = Counter()
    for text in texts:
        words.update(pattern.findall(text))
    return words


def train_bpe(texts, n_tokens: int) -> list[bytes]:
    """The tokens, by their ids: the 256 bytes, then what is merged, in this order. Of pairs that
    are equally frequent the one of the lowest ids comes first. Fewer than n_tokens if all words are
    tokens."""
    counted = {word: count for word, count in count_words(texts).items()
               if len(word) <= MOST_CHARACTERS}
    words = [list(word.encode()) for word in counted]           # ids, merged in place
    counts = list(counted.values())
    pair_counts = Counter()
    words_with = defaultdict(set)       # {pair: numbers of words that have, or had, it}
    for number, word in enumerate(words):
        for pair in zip(word, word[1:]):
            pair_counts[pair] += counts[number]
            words_with[pair].add(number)
    heap = [(-count, pair) for pair, count in pair_counts.items()]
    heapq.heapify(heap)
    tokens = [bytes([byte]) for byte in range(256)]
    numbers = {token: number for number, token in enumerate(tokens)}
    while len(tokens) < n_tokens and heap:
        count, pair = heapq.heappop(heap)
        if -count != pair_counts[pair]:                         # the count has changed since
            if pair_counts[pair] > 0:
                heapq.heappush(heap, (-pair_counts[pair], pair))
            continue
        token = tokens[pair[0]] + tokens[pair[1]]
        if token not in numbers:        # "aba" can be both a, ba and ab, a
            numbers[token] = len(tokens)
            tokens.append(token)
        new_pairs = set()
        for number in words_with.pop(pair):
            for changed, sign in merge(words[number], pair, numbers[token]):
                pair_counts[changed] += sign * counts[number]
                if sign > 0:
                    words_with[changed].add(number)
                    new_pairs.add(changed)
        pair_counts[pair] = 0
        for new in new_pairs:
            if pair_counts[new] > 0:            # not merged into another at once
                heapq.heappush(heap, (-pair_counts[new], new))
    return tokens


def merge(word: list[int], pair: tuple[int, int], new: int):
    """Replace each occurrence of the pair in a word by the token `new`, in place. Yields (pair, -1)
    for the neighboring pairs that go, and (pair, 1) for those that come."""
    i = 0
    while i < len(word) - 1:
        if (word[i], word[i + 1]) == pair:
            for left in (i - 1, i + 1):
                if 0 <= left < len(word) - 1:
                    yield (word[left], word[left + 1]), -1
            word[i:i + 2] = [new]
            for left in (i - 1, i):
                if 0 <= left < len(word) - 1:
                    yield (word[left], word[left + 1]), 1
        i += 1


def find_merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The pair of tokens that each token above the bytes is made of, in their order: the two parts
    that are left when its own bytes are merged by the tokens before it."""
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) == 1:
            continue
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            joined = [ranks.get(left + right, rank) for left, right in zip(parts, parts[1:])]
            least = min(joined)
            if least >= rank:
                raise ValueError(f"the token {token!r} is no pair of earlier ones")
            at = joined.index(least)
            parts[at:at + 2] = [parts[at] + parts[at + 1]]
        merges.append(tuple(parts))
    return merges
