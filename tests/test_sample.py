"""sample.py: what is drawn, and the cache of keys and values.

Mistakes: test_refusals.py. Conversations: test_conversations.py."""
import io
import random
import re
import sys
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import checkpoint
import sample
from corpus.tokenizers import get_tokenizer
from runtime import samples as texts
from tests.harness import CFG, plain_generate, random_gpt


def test_sampling_prints_only_text_and_is_a_function_of_the_seed_and_the_flags(run_sample, things):
    """Greedy sampling, a temperature near 0, --top-k 1 and a small --top-p print the most probable
    tokens of the plain model."""
    def text(*flags, **options):
        status, out, error = run_sample("--max-tokens", 30, "--seed", 1, *flags, **options)
        assert (status, error) == (0, "") and out.startswith("line ") and out.endswith("\n")
        return out

    prompt = ("--prompt", "line ")
    assert text(*prompt) == text(*prompt) != text(*prompt, "--seed", 2)
    plain, _ = checkpoint.load_model(things / "whole.pt")
    tokens = plain_generate(plain, b"line ", 30, temperature=0)
    expected = "line " + bytes(tokens).decode(errors="replace") + "\n"
    assert text(*prompt, "--temperature", 9) != expected
    for flags in ("--temperature 0", "--temperature 1e-6", "--temperature 9 --top-k 1",
                  "--temperature 9 --top-p 1e-6"):
        assert text(*prompt, *flags.split()) == expected, flags
    assert text("--prompt", "-", "--temperature", 0, stdin="line ") == expected
    status, out, error = run_sample("--temperature", 0, "--prompt", "x" * 10 + "line 12: some wo")
    assert status == 0 and error.count("\n") == 1 and "26 tokens" in error
    assert run_sample("--temperature", 0, "--prompt", "line 12: some wo") == (0, out[10:], "")


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_samples_of_a_batch_equal_those_drawn_one_by_one(temperature):
    """Sample i, token by token, is that of seed i alone: it does not depend on how many there are,
    nor on when others end."""
    def drawn(seeds, end):
        generators = [torch.Generator().manual_seed(i) for i in seeds]
        tokens = [[] for _ in seeds]
        for of in sample.generate(random_gpt(CFG), [1, 2, 3], 40, {end}, temperature,
                                  generators=generators):
            for i, token in enumerate(of):
                if token is not None:
                    tokens[i].append(token)
        return tokens
    alone = [drawn([i], end=-1)[0] for i in range(4)]
    assert len(set(map(tuple, alone))) == (4 if temperature else 1)
    end = alone[1][20]                                      # where the others go on, or all end
    assert drawn(range(4), end) == [
        tokens[:tokens.index(end) if end in tokens else None] for tokens in alone]


def test_sampling_stops_at_the_end_of_text_and_never_draws_padding():
    """At a temperature at which all tokens are nearly as probable, 256 comes within 2,000 tokens
    and ends the sample, and none of the padding above it comes."""
    drawn = list(sample.generate(random_gpt(CFG), [1], 2000, {256}, temperature=1000.0,
                                 generators=[torch.Generator().manual_seed(0)]))
    assert 0 < len(drawn) < 2000 and max(of[0] for of in drawn) < 256


@pytest.mark.parametrize("seq_len, positions", [
    (1, [1] * 24), (5, [3, 1, 1] + [2, 1, 1, 1] * 5 + [2]), (16, [3] + [1] * 13 + [8] + [1] * 8)])
def test_sampling_computes_each_token_once_until_its_window_is_full(seq_len, positions):
    """Serves the speed of "greedy sampling": the number of positions in each forward; the tokens
    are those of the plain model without a cache."""
    plain = random_gpt(replace(CFG, seq_len=seq_len))
    seen = []
    plain.embed.register_forward_hook(lambda module, args, x: seen.append(x.shape[1]))
    drawn = [of[0] for of in sample.generate(plain, [1, 2, 3], 40, {256}, temperature=0)]
    assert seen[:len(positions)] == positions
    assert drawn == plain_generate(plain, [1, 2, 3], 40, temperature=0)


def kept_by_hand(weights, k, p):
    """The tokens that top-k, then top-p keep of probabilities in the ratio of these whole numbers,
    in exact fractions: the most probable first, of equal ones the lowest."""
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    order = order[:k or None]
    whole = sum(weights[token] for token in order)
    reached = Fraction(0)
    kept = []
    for token in order:
        if reached >= p:
            break
        reached += Fraction(weights[token], whole)
        kept.append(token)
    return sorted(kept)


def test_top_k_keeps_exactly_k_and_top_p_the_smallest_set_that_reaches_p():
    """They have the softmax of these alone, each row for itself. Of equal tokens the lowest come
    first. The sums of probabilities that reach p exactly do so in spite of rounding; in 16 bits
    many tokens are equal."""
    def kept(logits, k, p, temperature=1.0):
        return sample.filter_logits(logits, temperature, k, float(p)).nonzero()[:, 0].tolist()
    assert kept(torch.zeros(300), 3, 1.0, 1e-6) == [0, 1, 2]
    assert kept(torch.tensor([1.0, 3.0, 2.0]), 2, 1.0, 1e30) == [1, 2]
    one = torch.tensor([2.0, -1.0, 3.0])
    torch.testing.assert_close(sample.filter_logits(one, 2.0, 0, 1.0), (one / 2).softmax(0))
    assert sample.filter_logits(one, 1e-40, 0, 1.0).tolist() == [0, 0, 1]
    rng = random.Random(0)
    for _ in range(300):
        weights = [rng.choice((1, 2, 3, 10, 50)) for _ in range(rng.choice((2, 7, 300)))]
        k = rng.choice((0, 1, 2, 5, 1000))
        top = sorted(weights, reverse=True)[:k or None]         # p that some set reaches exactly
        p = min(Fraction(sum(top[:rng.randint(1, len(top))]), sum(top)), Fraction(99, 100))
        logits = torch.tensor(weights, dtype=torch.float64).log().float() + rng.uniform(-3, 3)
        if len(set(logits.tolist())) == len(set(weights)):
            by_hand = kept_by_hand(weights, k, p)
            assert kept(logits, k, p) == by_hand, (weights, k, p)
            rows = torch.stack([logits, logits.roll(1)])
            one, other = sample.filter_logits(rows, 1.0, k, float(p))
            torch.testing.assert_close(one[by_hand], logits[by_hand].softmax(0))
            assert other.equal(sample.filter_logits(rows[1], 1.0, k, float(p)))
    one = torch.randn(50257, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = kept(one, 40, 1.0)
    assert found == sorted(sorted(range(50257), key=lambda i: (-one[i].item(), i))[:40])
    assert len(kept(torch.zeros(50257), 0, 0.5)) == 25129


# ---- The command line

def test_samples_end_before_the_stop_text_and_are_separated_by_dashes(run_sample):
    """Sample 7 is that of --seed 7. What looks like the beginning of a stop text that never comes
    is not lost. Each line of standard input is a prompt."""
    flags = ("--max-tokens", 40, "--temperature", 1, "--prompt")
    line = "-" * 40 + "\n"
    many = run_sample(*flags, "line ", "--num-samples", 20)[1].split(line)
    assert len(set(many)) > 15 and many[7] == run_sample(*flags, "line ", "--seed", 7)[1]
    seed, stop = next((i, found[0]) for i, text in enumerate(many)
                      if (found := re.search("[ -~]{3}", text[7:])))
    cut = [re.sub(f"(?s)(?<=^line )(.*?){re.escape(stop)}.*", r"\1\n", text)
           for text in many[seed:seed + 3]]
    assert 6 < len(cut[0]) < len(many[seed])
    for count in (1, 3):
        assert run_sample(*flags, "line ", "--seed", seed, "--num-samples", count, "--stop",
                          stop) == (0, line.join(cut[:count]), "")
    never = many[seed].rstrip("\n")[-2:] + "\0"
    assert run_sample(*flags, "line ", "--seed", seed, "--stop", never)[1] == many[seed]
    both = [run_sample(*flags, prompt, "--num-samples", 2)[1] for prompt in ("line 1", "so")]
    assert run_sample(*flags, "-", "--num-samples", 2,
                      stdin="line 1\nso\n") == (0, line.join(both), "")


def test_the_first_sample_is_shown_as_it_grows_but_for_what_may_begin_the_stop_text(monkeypatch):
    """The last two characters may begin a stop text of three. The id 999 is no text."""
    seen = []

    def scripted():                     # in place of sample.generate
        for first, second in [*zip(b"abcdxy", b"xyz"), *((x, None) for x in (999, *b"dxyz"))]:
            yield [first, second]
            seen.append(sys.stdout.getvalue())
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    args = SimpleNamespace(prompt="p", stop="xyz", num_samples=2, max_tokens=9, seed=0)
    samples = texts.Samples(args, get_tokenizer("bytes"), CFG)
    next(samples.prompts())
    samples.write(scripted())
    assert seen == ["p", "p", "pa", "pa", "pab", "pabc", "pabcd"]
    assert sys.stdout.getvalue() == "pabcd\n" + texts.DASHES + "p\n"


def test_characters_are_printed_whole_and_an_error_in_one_line(run_sample, monkeypatch):
    """Bytes that are no character print as one replacement character, and a terminal shows a
    question mark for what it lacks. Too little memory is one line; a bug keeps its traceback."""
    def generate(*_):
        yield from ([token] for token in "é漢🙂!".encode() + b"\xff!" + "é".encode()[:1])
    monkeypatch.setattr(sample, "generate", generate)
    assert run_sample() == (0, "é漢🙂!\ufffd!\ufffd\n", "")
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    with mock.patch.object(sys, "stdout", terminal):
        run_sample("--dtype", "bf16")
    assert terminal.buffer.getvalue() == b"???!?!?\n"
    for error in ("CUDA out of memory. Tried 9", "a bug"):
        monkeypatch.setattr(sample, "generate", mock.Mock(side_effect=RuntimeError(error)))
        if error == "a bug":
            with pytest.raises(RuntimeError, match="a bug"):
                run_sample()
        else:
            status, out, said = run_sample()
            assert (status, out, said.count("\n")) == (1, "", 1) and "--device cpu" in said


def test_logits_that_are_not_finite_are_told_in_one_line(run_sample, things, tmp_path):
    state = torch.load(things / "whole.pt")
    state["parameters"]["head.norm.weight"][0] = torch.nan
    torch.save(state, tmp_path / "nan.pt")
    for temperature in (0, 1):
        status, _, error = run_sample("--ckpt", tmp_path / "nan.pt", "--temperature", temperature)
        assert status == 1 and "logits are not finite" in error and error.count("\n") == 1
