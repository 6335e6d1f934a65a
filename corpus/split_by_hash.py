"""Which documents validate: a function of (seed, text of the document), about 5% of them. If these
hold more than a quarter of the text, each gives only its end, together 5% of all. With fewer than
20 documents, each gives its last 5%. Conversations are never cut, and those with the same text
before the last answer are in the same split."""
import numpy as np

VAL_ONE_IN = 20             # documents, or bytes of each document where there are fewer


def choose_split(digests, sizes, may_cut=True):
    """The bytes of each document that train."""
    if len(sizes) < VAL_ONE_IN and may_cut:
        train_sizes = sizes - np.maximum(sizes // VAL_ONE_IN, 1)
        if train_sizes.max(initial=0) < 4:                  # bytes of the longest character
            raise ValueError("the input holds no text, or less than 5 bytes: give it more")
        return train_sizes
    score, other_score = digests.view("<u8").reshape(-1, 2).T          # 8 of the 16 bytes each
    if len(score) < 2:
        raise ValueError("the input holds fewer than two different conversations: one trains, and "
                         "one validates: give it more")
    if score.min() == score.max():          # all have the same prompt
        score = other_score
    validates = score < 2**64 // VAL_ONE_IN
    validates |= score == score.min()                       # both splits receive documents
    validates &= score != score.max()
    most = int(sizes.sum()) // VAL_ONE_IN
    drawn = int(sizes[validates].sum())
    if drawn <= 5 * most or not may_cut:
        return np.where(validates, 0, sizes)
    shares = np.maximum(sizes * (most / drawn), 1).astype(np.int64)
    return np.where(validates, sizes - shares, sizes)
