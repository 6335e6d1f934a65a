"""The order of the windows in an epoch: a permutation that takes no memory."""
import numpy as np


def permute(numbers: np.ndarray, n: int, *key: int) -> np.ndarray:
    """These numbers after a permutation of 0 ... n - 1 that is a function of the key, int64 (k,) ->
    int64 (k,). As np.random.permutation(n)[numbers], but it takes no memory, however large n is.

    A Feistel network of six rounds permutes the numbers of 2 h bits (Luby and Rackoff 1988): each
    round XORs one half with a function of the other. A result of n or above goes through the
    network again (cycle walking, Black and Rogaway 2002). At most three in four do.
    """
    bits = (n - 1).bit_length()
    h = np.uint64(max(1, (bits + 1) // 2))
    mask = (np.uint64(1) << h) - np.uint64(1)
    round_keys = np.random.SeedSequence(key).generate_state(6, np.uint64)
    numbers = numbers.astype(np.uint64)
    walking = np.ones(len(numbers), bool)
    while walking.any():
        left = numbers[walking] >> h
        right = numbers[walking] & mask
        for round_key in round_keys:
            # Products modulo 2^64 and shifts mix the bits, with MurmurHash3's constants.
            x = (right + round_key) * np.uint64(0xFF51AFD7ED558CCD)
            x = (x ^ x >> np.uint64(33)) * np.uint64(0xC4CEB9FE1A85EC53)
            x = (x ^ x >> np.uint64(33)) & mask
            left, right = right, left ^ x
        numbers[walking] = left << h | right
        walking = numbers >= n
    return numbers.astype(np.int64)
