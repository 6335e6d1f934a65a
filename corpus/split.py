"""Which documents validate: a function of (seed, text of the document), about 5% of them. If these
hold more than a quarter of the text, each gives only its end, together 5% of all. With fewer than
20 documents, each gives its last 5%."""
import numpy as np

VAL_ONE_IN = 20             # documents, or bytes of each document where there are fewer


def choose_split(digests, sizes):
    """(bytes of each document that train, whether a rule against long documents holds)."""
    if len(sizes) < VAL_ONE_IN:
        train_sizes = sizes - np.maximum(sizes // VAL_ONE_IN, 1)
        if train_sizes.max(initial=0) < 4:                  # bytes of the longest character
            raise ValueError("the input holds no text, or less than 5 bytes: give it more")
        return train_sizes, False
    score = digests.view("<u8")[::2]                        # the first 8 of the 16 bytes
    validates = score < 2**64 // VAL_ONE_IN
    validates[score.argmin()] = True                        # both splits receive documents
    validates[score.argmax()] = False
    most = int(sizes.sum()) // VAL_ONE_IN
    drawn = int(sizes[validates].sum())
    if drawn <= 5 * most:
        return np.where(validates, 0, sizes), False
    shares = np.maximum(sizes * (most / drawn), 1).astype(np.int64)
    return np.where(validates, sizes - shares, sizes), True
