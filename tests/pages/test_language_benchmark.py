"""Tests that the benchmark of language models runs in miniature, continues a file, and counts the tokens it says."""

import importlib
import json
import math
from argparse import Namespace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("peft", reason="needs peft")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
WORDS = ["<pad>", "<unk>", "user", "assistant", ":", ";", "one", "two", "three", "four", "five", "six", "red", "blue"]
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ' : ' + message['content'] + ' ; ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
)
SMALL = ["--steps", "3", "--batch", "4", "--reference-batch", "3", "--references", "18", "--chats", "5"]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("language")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a tiny Llama, its tokenizer of whole words, and texts of various lengths."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("language")
    words = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path / "model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=len(WORDS), pad_token_id=0, tie_word_embeddings=True, **sizes)
    LlamaForCausalLM(config).save_pretrained(path / "model")
    generator = torch.Generator().manual_seed(0)

    def sentence(longest: int) -> str:
        count = 1 + int(torch.randint(longest, (1,), generator=generator))
        return " ".join(WORDS[6 + place] for place in torch.randint(8, (count,), generator=generator).tolist())

    for name, count, answer in (("gsm8k_train", 12, "one"), ("gsm8k_test", 4, "one"), ("alpaca", 23, None)):
        rows = [{"question": sentence(6), "answer": answer or sentence(6)} for _ in range(count)]
        (path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def rows(bench, folder, tmp_path):
    """Return a function that runs the benchmark and returns its rows."""
    out = tmp_path / "rows.jsonl"

    def run(*arguments):
        paths = ["--weights", str(folder / "model"), "--data", str(folder), "--out", str(out)]
        assert bench.main([*arguments, *paths, *SMALL]) == 0
        return [json.loads(line) for line in out.read_text().splitlines()]

    return run


def make_problem(bench, folder, **options):
    """Return the problem of the tiny model, in float32."""
    given = bench.make_parser().parse_args(["--weights", str(folder / "model"), "--data", str(folder), *SMALL])
    return bench.make_problem(Namespace(**{**vars(given), "precision": "float32", **options}))


def test_every_method_trains_and_its_row_is_stored_and_continued(bench, rows, capsys):
    (first,) = rows("--methods", "plain", "--dials", "0.01", "--seeds", "1")
    assert first["loss"] < first["loss_before"]
    assert 0 < first["kl"] < 1
    known = rows("--dials", "0.01", "--seeds", "1")
    assert known[0] == first
    assert [row["method"] for row in known] == list(bench.METHODS)
    for row in known:
        assert row["loss_before"] == first["loss_before"]
        assert row["kl"] > 0
        assert row["loss"] != row["loss_before"]
        assert math.isfinite(row["accuracy"])
    moored = [row for row in known if row["method"].endswith("mooring")]
    assert len(moored) == 2
    assert all(row["gauge"] <= row["dial"] for row in moored)
    assert rows("--dials", "0.01", "--seeds", "1") == known
    shown = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("| lora-mooring | 0.01 | 1 |") for line in shown) == 2
    with pytest.raises(SystemExit):
        rows("--dials", "0.01", "--rate", "0.1")
    assert "has results of" in capsys.readouterr().err


def test_penalty_of_kl_by_hand_is_the_dense_divergence_without_padding(bench, folder):
    problem = make_problem(bench, folder)
    training = importlib.import_module("language_models.training")
    run = training.Run(problem, seed=0)
    terms = []
    run.train = lambda penalty: terms.append(penalty(1))
    with torch.no_grad():
        for p in run.model.parameters():
            p += 0.1 * torch.randn_like(p)
    importlib.import_module("language_models.methods").kl_by_hand(run, 0.7)
    batch, total, count = problem.reference[1], 0.0, 0
    assert batch["attention_mask"].sum() < batch["attention_mask"].numel()  # there is padding
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True):
        alone = ids[: int(mask.sum())][None]
        with torch.no_grad():
            p, q = (model(input_ids=alone).logits[0].double().softmax(-1) for model in (problem.original, run.model))
        total += float((p * (p / q).log()).sum())
        count += alone.numel()
    assert float(terms[0]) == pytest.approx(0.7 * total / count, rel=1e-5)
    assert run.second_model


def test_results_count_no_padding_and_do_not_depend_on_batches(bench, folder):
    evaluation = importlib.import_module("language_models.evaluation")
    alone, together = (make_problem(bench, folder, tokens=tokens) for tokens in (1, 10_000))
    model = importlib.import_module("language_models.training").Run(alone, seed=0).model
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    expected, got = (evaluation.results(problem, model) for problem in (alone, together))
    assert got == pytest.approx(expected, rel=1e-5)
    losses = []
    for text in alone.test:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([text.ids])).logits[0, :-1]
        learned = torch.tensor(text.labels[1:])
        losses += torch.nn.functional.cross_entropy(logits, learned, reduction="none")[learned >= 0].tolist()
    assert got["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_labels_are_on_the_answer_alone(bench, folder):
    texts = importlib.import_module("language_models.texts")
    tokenizer = make_problem(bench, folder).tokenizer
    row = {"messages": [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "red"}]}
    text = texts.encode(tokenizer, row, length=100)
    assert tokenizer.decode(text.ids) == "user : one two ; assistant : red ;"
    assert text.labels == [-100] * 7 + text.ids[7:]
    assert texts.encode(tokenizer, {"prompt": "one two", "completion": "red"}, length=100) == text
    assert texts.encode(tokenizer, row, length=8).labels == text.labels[:8]
    assert texts.encode(tokenizer, row, length=7) is None  # of the answer nothing is left
    with pytest.raises(ValueError, match="is no conversation"):
        texts.encode(tokenizer, {"text": "one"}, length=100)


def test_first_dials_come_first_and_parts_are_all_runs_once(bench):
    parser = bench.make_parser()
    first = bench.choices(parser.parse_args(["--seeds", "2"]), ["plain", "mooring"], None)
    plain, mooring = (bench.METHODS[name].dials for name in ("plain", "mooring"))
    assert first[:3] == [("plain", plain[0], 0), ("mooring", mooring[0], 0), ("plain", plain[1], 0)]
    assert first[-2:] == [("plain", plain[0], 1), ("mooring", mooring[0], 1)]
    assert len(first) == len(plain) + len(mooring) + 2
    options = [parser.parse_args(["--part", f"{part}/3", "--all-seeds"]) for part in range(3)]
    parts = [set(bench.choices(option, ["plain", "mooring"], None)) for option in options]
    assert len(set().union(*parts)) == sum(map(len, parts)) == 3 * (len(plain) + len(mooring))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--methods", "magic"], "unknown method 'magic'"),
        (["--weights", "nowhere"], "nowhere does not exist"),
        (["--weights", ".", "--task", "cooking"], "'cooking' is no task"),
    ],
)
def test_bad_options_are_refused(bench, capsys, arguments, line):
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert line in capsys.readouterr().err
