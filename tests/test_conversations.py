"""Conversations: what is learnt, how windows are packed, training on answers alone, chatting."""
import functools
import io
import math
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import checkpoint
import data
import sample
import train
from corpus import conversations
from corpus.chat_records import Message, Refused, messages_of
from corpus.mixtures import NO_WINDOW
from corpus.prepare import prepare
from corpus.shards import BEGINS, LEARNT
from corpus.templates import PlainTemplate
from corpus.tokenizers import get_tokenizer
from models.llama import LlamaConfig
from runtime.divergence import ANSWERS_DEVIATION
from tests.commands import TINY, expect_mistake, meta_of, run_main, write_lines
from tests.harness import BOUNDS, CFG, differences, relative, trained

WORDS = replace(CFG, n_layer=4, seq_len=32)     # windows for the conversations of `reversals`


def pair(prompt, completion):
    return dict(prompt=prompt, completion=completion)


def messages(*pairs):
    return dict(messages=[dict(role=role, content=content) for role, content in pairs])


@pytest.fixture(scope="module")
def reversals(tmp_path_factory):
    """Shards of 400 conversations of one or two turns: each answer is the question backwards. The
    lengths, and so the numbers of targets, differ. Some end in another shard than they begin."""
    folder = tmp_path_factory.mktemp("reversals")
    draw = random.Random(0)
    records = []
    for _ in range(400):
        words = ["".join(draw.choices("abcdef", k=draw.randint(1, 5))) for _ in range(2)]
        turns = [turn for word in words[:draw.choice([1, 1, 2])]
                 for turn in (("user", word), ("assistant", word[::-1]))]
        records.append(messages(*turns))
    files = [write_lines(folder / "chat.jsonl", records)]
    prepare(files, folder / "data", "bytes", field=None, shard_tokens=4000)
    assert len(list(folder.glob("data/train_*.learn"))) > 2
    return folder / "data"


# ---- Templates -------------------------------------------------------------------------------

def written(tokens):
    """Tokens of bytes as text; the special ones as E, S and M."""
    return "".join(chr(token) if token < 256 else "ESM"[token - 256] for token in tokens)


def test_plain_writes_a_conversation_and_marks_its_answers():
    """By literals. Learnt are the answers, each with the token that ends it, but for one."""
    turns = [("system", " be brief "), ("user", "2 + 2?"), ("assistant", "4"), ("user", "more"),
             ("assistant", ""), ("user", "a"), ("assistant", "b", False),
             ("user", "\n<|endoftext|>"), ("assistant", " 5\n")]
    tokens, is_learnt = PlainTemplate(get_tokenizer("bytes")).render(
        [Message(*turn) for turn in turns])
    assert written(tokens) == (
        "Esystem:\n be brief \n\nuser:\n2 + 2?\n\nassistant:\n4Euser:\nmore\n\nassistant:\nEuser:"
        "\na\n\nassistant:\nbEuser:\n\n<|endoftext|>\n\nassistant:\n 5\nE")
    parts = re.findall("1+", "".join(str(int(flag)) for flag in is_learnt))
    assert [len(part) for part in parts] == [2, 1, 4]
    assert written(np.array(tokens)[is_learnt]) == "4EE 5\nE"


# ---- Shards, flags and windows ---------------------------------------------------------------

def conversation_windows(lengths, learnt, seq_len, cut_at=()):
    """Of tokens 1, 2, 3, ... in shards; the last `learnt` of each conversation are learnt."""
    tokens = np.arange(1, sum(lengths) + 1)
    flags = np.zeros(len(tokens), np.uint8)
    for end, length, count in zip(np.cumsum(lengths), lengths, learnt):
        flags[end - length] |= BEGINS
        flags[end - count:end] |= LEARNT
    shards = np.split(tokens, cut_at)
    return conversations.ConversationWindows(shards, np.split(flags, cut_at), seq_len)


@pytest.mark.parametrize("cut_at", [(), (5, 12), (1, 2, 3)])
def test_windows_hold_whole_conversations_with_positions_of_their_own(cut_at):
    """By literals, in windows of 10 tokens; whichever shards a conversation lies in."""
    made = conversation_windows([4, 9, 3, 14, 12], [1, 2, 1, 6, 1], 9, cut_at)
    assert (made.count, made.n_truncated, made.n_left_out) == (3, 1, 1)
    assert [made.count_targets(window) for window in range(3)] == [2, 2, 2]
    rows = {name: np.zeros((3, 10), int) for name in ("tokens", "positions", "has_loss")}
    for window in range(3):
        made.fill(window, **{name: x[window] for name, x in rows.items()})
    assert [{name: x[window].tolist() for name, x in rows.items()} for window in range(3)] == [
        dict(tokens=[17, 18, 19, 20, 21, 22, 23, 24, 25, 26],           # 27 to 30 are cut off
             positions=[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], has_loss=[0] * 8 + [1] * 2),
        dict(tokens=[5, 6, 7, 8, 9, 10, 11, 12, 13, 0],
             positions=[0, 1, 2, 3, 4, 5, 6, 7, 8, 0], has_loss=[0] * 7 + [1] * 2 + [0]),
        dict(tokens=[1, 2, 3, 4, 14, 15, 16, 0, 0, 0],
             positions=[0, 1, 2, 3, 0, 1, 2, 0, 0, 0], has_loss=[0, 0, 0, 1, 0, 0, 1, 0, 0, 0])]


@pytest.mark.parametrize("lengths, size", [
    (np.random.default_rng(0).integers(1, 65, 500), 64),
    (np.random.default_rng(1).geometric(0.02, 2000).clip(2, 129), 129), (np.full(7, 5), 9)])
def test_packing_fills_windows_and_is_a_function_of_the_lengths(lengths, size):
    """No window is overfull, and there are at most 11/9 of the fewest possible, and one (Johnson
    1974), here even 2% more: best fit decreasing."""
    placed, count = conversations.pack(lengths, size)
    filled = np.bincount(placed, lengths, count)
    assert filled.max() <= size and filled.min() > 0
    at_least = max(math.ceil(lengths.sum() / size), int((lengths > size / 2).sum()))
    assert count <= math.ceil(1.02 * at_least)
    assert np.array_equal(conversations.pack(lengths, size)[0], placed)


def test_inputs_targets_and_counts_are_those_of_the_shards(reversals):
    """Each conversation is in one window, as the shards have it; its learnt targets are its answers
    and their ends; every count is known without reading; NO_WINDOW has none."""
    for split in ("train", "val"):
        made = data.TokenDataset(reversals, split, 96)
        ids = np.arange(made.n_windows)
        tokens, targets, positions = made.rows(ids)
        assert [made.count_targets([i]) for i in ids] == (targets >= 0).sum(1).tolist()
        text = written(np.concatenate([data.open_shard(path) for path in
                                       sorted(reversals.glob(f"{split}_*.bin"))]))
        found = []
        for row, place, last in zip(tokens, positions, made.read(ids)[0][:, -1]):
            begins = np.flatnonzero((place == 0) & (row == 256))
            ends = [*begins[1:], len(row)]
            found += [written([*row[a:b], last] if b == len(row) else row[a:b]).rstrip("\0")
                      for a, b in zip(begins, ends)]
        assert sorted(found) == sorted(re.findall("Euser.*?E(?=E|$)", text, re.DOTALL))
        answers = written(targets[targets != data.IGNORE_INDEX])
        assert sorted(answers) == sorted("".join(re.findall("assistant:\n([a-f]*E)", text)))
        padded = made.rows([NO_WINDOW, 0])[1]
        assert (padded[0] == data.IGNORE_INDEX).all() and (padded[1] == targets[0]).all()
        assert made.count_targets([NO_WINDOW]) == 0


def test_a_last_question_is_in_one_split_and_equal_conversations_count_once(make_data):
    """Forty questions with four answers each, twice. What precedes the last answer decides."""
    opening = [("system", "x"), ("user", "hi"), ("assistant", "hello")]
    records = [messages(*opening, ("user", f"prompt {i}"), ("assistant", f"{j}"))
               for i in range(40) for j in range(4)]
    out, _ = make_data(write_lines("c.jsonl", 2 * records), "--near-duplicates", "ignore")
    assert "160 conversations, 160 duplicates dropped" in out
    prompts, held_out = (
        re.findall(r"prompt \d+", written(data.open_shard(Path(f"out/{split}_000000.bin"))))
        for split in ("train", "val"))
    assert len(prompts + held_out) == 160 > len(prompts) > 100
    assert not set(prompts) & set(held_out)


TURNS = [dict(role="user", content="a b"), dict(role="assistant", content="c")]
SHAREGPT = [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "c"}]
SYSTEM = dict(role="system", content="s")


@pytest.mark.parametrize("record, same_as", [
    (dict(messages=TURNS), TURNS), (dict(messages=[SYSTEM, *TURNS], tools=[]), [SYSTEM, *TURNS]),
    (dict(prompt="a b", completion="c"), TURNS), (dict(conversations=SHAREGPT), TURNS),
    (dict(prompt=[SYSTEM, TURNS[0]], completion="c"), [SYSTEM, *TURNS]),
    (dict(messages=[dict(role="developer", content="s"), *TURNS]), [SYSTEM, *TURNS]),
    (dict(messages=[dict(role="user", content=[dict(type="text", text="a"), dict(
        type="text", text=" b")]), TURNS[1]]), TURNS),
    (dict(instruction="a", input="b", output="c"), [TURNS[0] | dict(content="a\n\nb"), TURNS[1]]),
    (pair(TURNS, "d"),
     [TURNS[0], TURNS[1] | dict(is_learnt=False), dict(role="assistant", content="d")]),
    (dict(messages=[TURNS[0], TURNS[1] | dict(weight=1, thinking="t")]),
     [TURNS[0], TURNS[1] | dict(reasoning="t")]),
    *((dict(messages=[*TURNS, TURNS[1] | said]), [*TURNS, TURNS[1] | dict(is_learnt=False)])
      for said in (dict(weight=0), dict(train=False), dict(loss=False)))])
def test_other_forms_of_a_conversation_are_the_same_conversation(record, same_as):
    assert messages_of(record) == [Message(**turn) for turn in same_as]


@pytest.mark.parametrize("record, words", [
    (dict(text="a"), 'neither "messages"'), (dict(messages="x"), "not an array"),
    (dict(messages=["x"]), "message is str"), ("a", 'neither "messages"'),
    (messages(("user", "x")), "no answer that"), (messages(("robot", "x")), "'robot' is none of"),
    (dict(messages=TURNS, tools=[1]), '"tools"'),
    (dict(messages=[TURNS[0] | dict(images=["x"]), TURNS[1]]), '"images"'),
    (dict(messages=[TURNS[0] | dict(thinking="x"), TURNS[1]]), "only an answer"),
    (dict(messages=[TURNS[0], TURNS[1] | dict(weight=0.5)]), "true or false"),
    (dict(messages=[TURNS[0] | dict(train=True), TURNS[1]]), "true or false"),
    (pair("a", "b") | dict(label=False), "not learnt"), (pair("a", 5), "int, not a string"),
    (pair("a", "b") | dict(weight=0), "not learnt"), (pair("a", "\ud800"), "half a surrogate")])
def test_what_is_no_conversation_is_refused(record, words):
    with pytest.raises(Refused, match=words):
        messages_of(record)


def test_a_template_makes_the_same_conversations_of_every_kind_of_file(make_data):
    """Also of records that have text too. The completion of 10 bytes and its end are learnt."""
    records = [pair([dict(role="user", content=f"{i}"), TURNS[1]], f"answer {i:3}")
               | dict(text="t") for i in range(30)]
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    write_lines("c.jsonl", records)
    parquet.write_table(pyarrow.Table.from_pylist(records), "c.parquet")
    flags = "--template", "plain", "--near-duplicates", "ignore"
    shards = []
    for name in ("c.jsonl", "c.parquet"):
        make_data(name, *flags, "--out", f"{name}.out")
        assert sum(meta_of(f"{name}.out")["learnt"].values()) == 30 * 11
        shards.append({path.name: path.read_bytes() for path in Path(f"{name}.out").iterdir()
                       if path.suffix != ".json"})
    assert shards[0] == shards[1] and "train_000000.learn" in shards[0]


def test_text_and_conversations_are_not_mixed_in_one_job(make_data, refuse_data):
    chat = write_lines("c.jsonl", [pair(f"prompt {i}", "d") for i in range(30)])
    text = write_lines("t.jsonl", [dict(text="a")])
    Path("t.txt").write_text("text")
    for words, *given in (
            ("c.jsonl holds conversations, t.txt holds text", chat, "t.txt"),
            ("c.jsonl holds conversations, t.jsonl holds", text, chat),     # whichever is the first
            ("c.jsonl holds conversations, t.jsonl holds", chat, text),
            ("t.txt: JSON or Parquet", chat, "t.txt", "--template", "plain"),
            ("no --text-field", chat, "--template", "plain", "--text-field", "prompt"),
            ("--template --input", "--dataset=python", "--template=plain")):
        refuse_data(words, *given)
    make_data(write_lines("empty.jsonl", []), chat)
    make_data(chat, "--text-field", "prompt", "--out", "prompts")       # everything is learnt
    assert [len(list(Path(out).glob("*.learn"))) for out in ("out", "prompts")] == [2, 0]


@pytest.mark.parametrize("harm, words", [
    (lambda flags: flags.unlink(), "train_000000.learn is missing"),
    (lambda flags: flags.write_bytes(flags.read_bytes()[:-1]), "bytes for"),
    (lambda flags: flags.write_bytes(bytes(flags.stat().st_size)), "does not begin with a conv")])
def test_lost_or_damaged_flags_are_refused(make_data, run_train, harm, words):
    write_lines("c.jsonl", [pair(f"prompt {i}", "d") for i in range(60)])
    flags = "c.jsonl", "--shard-tokens", 1024
    make_data(*flags)
    harm(Path("out/train_000000.learn"))
    expect_mistake(run_train("--data", "out", "--out", "run", *TINY), words)
    make_data(*flags)                                       # makes it again
    assert data.TokenDataset("out", "train", 32).n_windows > 0


# ---- Training --------------------------------------------------------------------------------

@pytest.fixture
def train_on_answers(reference, reversals):
    """train_on_answers(layout, **flags) -> the run, once."""
    return functools.partial(reference, WORDS, data=str(reversals), steps=3, micro_batch=1)


@pytest.mark.claim("Trained on answers alone, every layout has the loss of one process: the mean "
                   "over the answers' tokens of the whole batch.")
@pytest.mark.parametrize("layout, flags, dtype", [
    ((4, 1, 1), dict(zero=2), "fp32"),
    ((1, 2, 2), dict(sequence_parallel=True, pp_schedule="1f1b"), "fp64"),
    ((2, 1, 1), dict(cp=2, zero=1), "fp64"),
    pytest.param((2, 2, 1), dict(zero=3, recompute=True), "fp64", marks=pytest.mark.slow)])
def test_layouts_train_on_answers_as_one_process(train_on_answers, layout, flags, dtype):
    ours, one = train_on_answers(layout, dtype=dtype, **flags), train_on_answers(dtype=dtype)
    assert max(differences(ours, one)) < BOUNDS[dtype]


def test_the_loss_is_the_mean_over_the_answers_of_the_batch(reversals, train_on_answers):
    """Loss and gradient norm are those of a plain model that sums over the rows of the batch, one
    at a time. The mean of the rows' means is another number."""
    dataset = data.TokenDataset(reversals, "train", WORDS.seq_len)
    seed = train.Config().seed
    ids = dataset.window_ids(seed, 0, 8)
    counts = [dataset.count_targets([i]) for i in ids]
    plain = WORDS.build().initialize(seed).double()
    losses = []
    for x, y, p in zip(*map(torch.from_numpy, dataset.rows(ids))):
        loss = plain(x[None], y[None], positions=p[None])
        loss.backward()
        losses.append(loss.item())
    norm = math.hypot(*(parameter.grad.norm() for parameter in plain.parameters()))
    row = train_on_answers(dtype="fp64").rows[0]
    assert relative([row["loss"], row["grad_norm"]],
                    [sum(losses) / sum(counts), norm / sum(counts)]) < 1e-10
    assert relative(np.mean(np.divide(losses, counts)), row["loss"]) > 1e-5


@pytest.mark.parametrize("cfg", [
    replace(WORDS, seq_len=96),
    LlamaConfig(vocab_size=257, seq_len=96, n_layer=2, n_head=8, n_embd=32, n_kv_head=4)],
    ids=["gpt", "llama"])
def test_the_loss_of_a_conversation_does_not_depend_on_its_neighbors(reversals, cfg):
    """The summed loss of packed windows is that of their conversations, each alone."""
    plain = cfg.build().initialize(0).double()
    dataset = data.TokenDataset(reversals, "val", 96)
    inputs, targets, positions = map(torch.from_numpy, dataset.rows(np.arange(dataset.n_windows)))
    packed = plain(inputs, targets, positions=positions)
    alone = []
    for row, target, place in zip(inputs, targets, positions):
        begins = (place == 0).nonzero().flatten().tolist()
        alone += [plain(row[None, begin:end], target[None, begin:end]).item()
                  for begin, end in zip(begins, [*begins[1:], 96]) if end > begin + 1]  # no padding
    assert len(alone) > dataset.n_windows and relative(packed.item(), sum(alone)) < 1e-12


def test_a_run_tells_what_it_cuts(tmp_path, reversals, run_train):
    """Conversations longer than a window lose their end, and not all; no --plain. The checkpoint
    says the template."""
    flags = ["--data", reversals, "--out", tmp_path / "a", *TINY, "--seq-len"]
    expect_mistake(run_train(*flags, 16), "no conversation has an answer in its first 16 + 1")
    expect_mistake(run_train(*flags, 32, "--plain"), "--plain reads text")
    status, out, _ = run_train(*flags, 32)
    source, = data.TokenDataset(reversals, "train", 32).mixture.sources.values()
    assert status == 0 and "tokens are learnt" in out and source.windows.n_truncated > 0
    assert (f"{source.windows.n_truncated:,} conversations lose their end, "
            f"{source.windows.n_left_out:,} have no answer") in out
    state = checkpoint.load(tmp_path / "a/latest.pt")
    assert state["template"] == "plain"
    assert state["monitor"]["least_deviation"] == ANSWERS_DEVIATION


def test_a_mixture_of_text_and_conversations(reversals, shards):
    """Text is learnt whole, beside answers."""
    dataset = data.TokenDataset(f"{reversals}=0.5,{shards}=0.5", "train", 32)
    assert dataset.meta["template"] == "plain"
    ids = dataset.window_ids(1337, 0, 8)
    _, targets, positions = dataset.rows(ids)
    text = [row for row, its, _ in dataset.mixture.find(ids) if isinstance(its, data.TextWindows)]
    assert len(text) == 4 and (targets[text] >= 0).all()
    assert (positions[text] == np.arange(32)).all()
    assert 4 * 32 < dataset.count_targets(ids) == (targets >= 0).sum() < 8 * 32


# ---- What is learnt --------------------------------------------------------------------------

LETTERS = replace(CFG, n_layer=2, n_head=4, n_embd=64, seq_len=64)


@pytest.fixture(scope="module")
def first_letters(pool, tmp_path_factory):
    """The folder of a run that learns to answer noise with its first letter."""
    folder = tmp_path_factory.mktemp("first")
    draw = random.Random(1)
    prompts = ["".join(draw.choices("abcdefgh", k=4)) for _ in range(1500)]
    records = [pair(prompt, prompt[0]) for prompt in prompts]
    prepare([write_lines(folder / "c.jsonl", records)], folder / "data", "bytes", field=None)
    trained(pool, (1, 1, 1), folder / "out", LETTERS, data=str(folder / "data"), batch_size=16,
            micro_batch=16, steps=200, lr=3e-3, warmup_steps=20, save_every=50)
    return folder


# ---- Chatting --------------------------------------------------------------------------------

def chat_with(monkeypatch, capsys, file, lines, *flags):
    lines = lines.encode(errors="surrogateescape")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines), "utf-8", newline="\n"))
    return run_main(capsys, sample, "--ckpt", file, "--chat", "--temperature", 0, *flags)


@pytest.mark.claim("`sample.py --chat` keeps a conversation.")
def test_a_chat_answers_each_line_of_standard_input(first_letters, monkeypatch, capsys):
    """The model answers with the first letter, and only answers go to standard output. While it
    learnt them, of prompts that are noise, no surprise was taken for a divergence."""
    file = first_letters / "out/latest.pt"
    result = chat_with(monkeypatch, capsys, file, "gabc\n\nbbac\n\nhabc")
    assert result == (0, "g\nb\nh\n", "")
    assert checkpoint.load(file)["monitor"]["rollbacks"] == 0


def test_a_chat_shows_the_model_the_conversation_so_far(first_letters, monkeypatch, capsys):
    """Each prompt holds the turns before, until the oldest do not fit; an empty line begins a new
    conversation. Line ends may be those of Windows; a character stands for a byte that is none."""
    shown = []

    def generate(model, tokens, max_tokens, ends, *choice):
        shown.append(written(tokens))
        assert ends == {256} and max_tokens == min(500, 64 - len(tokens))
        yield [ord("x")]
    monkeypatch.setattr(sample, "generate", generate)
    status, out, error = chat_with(monkeypatch, capsys, first_letters / "out/latest.pt",
                                   "a\r\nb\nc\udcff\r\n\r\nd\n" + 70 * "e" + "\nf\n")
    assert (status, out) == (0, "x\n" * 5) and "90 tokens, the model sees 64" in error
    one, two = "user:\n{}\n\nassistant:\n", "user:\n{}\n\nassistant:\nxE"
    assert shown == ["E" + one.format("a"), "E" + two.format("a") + one.format("b"),
                     "E" + two.format("b") + one.format("c\xef\xbf\xbd"),
                     "E" + one.format("d"), "E" + one.format("f")]
    monkeypatch.setattr("sys.stdin", None)
    expect_mistake(run_main(capsys, sample, "--ckpt", first_letters / "out/latest.pt", "--chat"),
                   "standard input, which is closed", program="sample.py")
