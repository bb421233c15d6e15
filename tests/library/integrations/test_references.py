"""Tests of references of language models: pairs, rows, datasets and mappings without labels."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import mooring
from mooring.errors import MooringError

pytest.importorskip("transformers", reason="needs mooring[transformers]")

from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration

from library.integrations.gpt import WORDS, arguments, gpt, text, train
from mooring.integrations.transformers import MooringCallback, is_dataset
from mooring.reference.batches import is_row
from mooring.reference.reference_labels import prepare_labels


def sentences(count: int = 8) -> torch.Tensor:
    return torch.stack([row["input_ids"] for row in text(0, count)])


def previous(model: nn.Module, reference, **options) -> dict[str, torch.Tensor]:
    """Return the importance on a reference, with a pull that measures nothing."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mooring.attach(model, optimizer, reference=reference, pull=mooring.Interpolation(), **options) as moor:
        return {name: score.clone() for name, score in moor.previous.items()}


def test_pairs_of_equal_ids_are_shifted_as_the_language_model_shifts_them():
    ids = sentences()
    ignored = torch.where(ids % 5 == 0, -100, ids)
    for labels in (ids, ignored):
        mapping = previous(gpt(), [{"input_ids": ids, "labels": labels}])
        torch.testing.assert_close(previous(gpt(), [(ids, labels)]), mapping, rtol=0, atol=0)
    unshifted = previous(
        gpt(),
        [(ids, ids)],
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]).logits.flatten(0, 1), batch[1].flatten()),
    )
    assert not torch.equal(mapping["transformer.wpe.weight"], unshifted["transformer.wpe.weight"])


@pytest.mark.parametrize("wrap", ["PEFT", "compile", "DataParallel"])
def test_pairs_of_equal_ids_are_shifted_by_a_wrapped_language_model(wrap):
    from peft import LoraConfig, get_peft_model

    wraps = {
        "PEFT": lambda model: get_peft_model(model, LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)),
        "compile": lambda model: torch.compile(model, backend="eager"),
        "DataParallel": nn.DataParallel,
    }
    ids = sentences(2)
    batch = prepare_labels(wraps[wrap](gpt()), (ids, ids), seed=0)
    assert batch == {"input_ids": ids, "labels": ids}


def test_pairs_shifted_by_hand_are_not_shifted_again():
    ids = sentences()
    by_hand = previous(gpt(), [(ids[:, :-1], ids[:, 1:])])
    expected = previous(gpt(), [ids], loss=lambda model, batch: model(input_ids=batch, labels=batch).loss)
    torch.testing.assert_close(by_hand, expected, rtol=1e-3, atol=1e-9)  # transformers' loss is float32


def test_pairs_for_an_encoder_and_a_decoder_are_given_as_labels():
    torch.manual_seed(1)
    size = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": WORDS}
    model = T5ForConditionalGeneration(T5Config(**size, decoder_start_token_id=0, pad_token_id=0))
    ids = sentences()
    pairs = previous(model, [(ids, ids.flip(1))])
    torch.testing.assert_close(pairs, previous(model, [{"input_ids": ids, "labels": ids.flip(1)}]), rtol=0, atol=0)


class Bigrams(nn.Sequential):
    """A language model that knows nothing of labels."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS))


def test_pairs_of_equal_ids_warn_where_the_model_takes_no_labels():
    ids = sentences()
    with pytest.warns(UserWarning, match=r"labels of the data or reference equal its inputs.* \(ids\[:, :-1\]"):
        previous(Bigrams(), [(ids, ids)] * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        previous(Bigrams(), [(ids[:, :-1], ids[:, 1:])])
        previous(Bigrams(), [ids])


@pytest.mark.parametrize("form", ["pair", "mapping"])
def test_text_without_masks_warns_where_the_model_predicts_masked_tokens(form):
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    model, ids = BertForMaskedLM(BertConfig(**size, vocab_size=WORDS)), sentences()
    with pytest.warns(UserWarning, match="a masked language model only has to copy: mask tokens"):
        previous(model, [(ids, ids)] if form == "pair" else [{"input_ids": ids, "labels": ids}])
    masked = ids.clone()
    masked[:, 0] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        previous(model, [{"input_ids": masked, "labels": ids.where(masked != ids, -100)}])


def test_mapping_without_labels_is_labelled_like_a_bare_tensor():
    ids = sentences()
    bare = previous(gpt(), [ids])
    torch.testing.assert_close(previous(gpt(), [{"input_ids": ids}]), bare, rtol=0, atol=0)


def test_padding_of_a_mapping_without_labels_gets_none():
    torch.manual_seed(1)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForMaskedLM(BertConfig(vocab_size=WORDS, **size))
    ids = sentences(4)
    mask = torch.ones_like(ids)
    mask[:, 5:] = 0
    seen = []
    head = model.get_output_embeddings()
    head.register_full_backward_hook(lambda module, into, out: seen.append(out[0]))
    previous(model, [{"input_ids": ids, "attention_mask": mask}])
    assert seen[-1][:, :5].abs().sum() > 0
    assert seen[-1][:, 5:].abs().sum() == 0


def test_mapping_with_an_argument_that_the_model_does_not_take_is_refused_in_one_line():
    with pytest.raises(MooringError, match=r"batch 0 .* does not fit the model \(.*'tokens'\): give inputs alone"):
        previous(Bigrams(), [{"tokens": sentences()}])


def test_rows_are_put_into_batches_by_the_trainers_collator(tmp_path):
    rows = text(0, 8)
    batches = [{"input_ids": part, "labels": part} for part in torch.stack([row["input_ids"] for row in rows]).split(4)]
    scores = []
    for reference in (batches, rows):
        callback = MooringCallback(reference=reference, pull=mooring.Interpolation(), consolidate=False)
        train(gpt(), callback, 1, tmp_path, max_steps=1)
        scores.append(callback.moor.previous)
    torch.testing.assert_close(*scores, rtol=0, atol=0)


class Numbered(torch.utils.data.Dataset):
    """Rows of one tensor and one label each; like many datasets it has no end but its length."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"features": torch.randn(3, generator=generator), "labels": torch.tensor(index % 2)}


class Classifier(nn.Linear):
    """A classifier that is not of transformers, and takes arguments of its own."""

    def forward(self, features, labels=None):
        logits = super().forward(features)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Endless(torch.utils.data.IterableDataset):
    """A dataset without an index."""

    def __len__(self) -> int:
        return 4

    def __iter__(self):
        return iter(torch.zeros(4, 2, 3))


def test_only_datasets_with_rows_are_put_into_batches():
    batches = torch.utils.data.TensorDataset(torch.zeros(4, 3))
    assert [is_dataset(data) for data in (Numbered(), Endless(), batches)] == [True, False, False]
    assert is_row({"pixel_values": torch.zeros(3, 8, 8), "labels": np.int64(1)})


def test_torch_dataset_is_put_into_batches_by_the_trainers_collator(tmp_path):
    from transformers import Trainer, default_data_collator

    rows = [Numbered()[index] for index in range(8)]
    batches = [default_data_collator(rows[:4]), default_data_collator(rows[4:])]
    scores = []
    for reference in (batches, Numbered(), rows):
        torch.manual_seed(0)
        options = {"pull": mooring.Interpolation(), "consolidate": False, "batches": None}
        callback = MooringCallback(reference=reference, **options)
        Trainer(
            Classifier(3, 2), arguments(tmp_path, max_steps=1), train_dataset=Numbered(), callbacks=[callback]
        ).train()
        scores.append(callback.moor.previous)
    torch.testing.assert_close(scores[1], scores[0], rtol=0, atol=0)
    torch.testing.assert_close(scores[2], scores[0], rtol=0, atol=0)


def test_dataset_is_put_into_batches_with_the_columns_of_the_training_data(tmp_path):
    datasets = pytest.importorskip("datasets", reason="needs datasets")
    from transformers import Trainer

    def dataset(task: int, **columns):
        rows = [row["input_ids"].tolist() for row in text(task, 8)]
        return datasets.Dataset.from_dict({"input_ids": rows, "labels": rows, **columns})

    scores = []
    batches = [{"input_ids": part, "labels": part} for part in sentences().split(4)]
    for reference in (batches, dataset(0, title=["old"] * 8)):
        callback = MooringCallback(reference=reference, pull=mooring.Interpolation(), consolidate=False)
        options = arguments(tmp_path, max_steps=1)
        Trainer(gpt(), options, train_dataset=dataset(1, title=["new"] * 8), callbacks=[callback]).train()
        scores.append(callback.moor.previous)
    torch.testing.assert_close(*scores, rtol=0, atol=0)
    untokenized = datasets.Dataset.from_dict({"title": ["old"] * 8})
    callback = MooringCallback(reference=untokenized)
    trainer = Trainer(gpt(), arguments(tmp_path), train_dataset=dataset(1), callbacks=[callback])
    with pytest.raises(MooringError, match="reference has no column 'input_ids': prepare it as the Trainer's data"):
        trainer.train()
    with pytest.raises(MooringError, match="has rows with input_ids, labels, not batches of tensors: give a DataLoad"):
        previous(gpt(), dataset(0))


def test_callback_refuses_a_fresh_copy_of_its_model(tmp_path):
    callback = MooringCallback(reference=[sentences()], pull=mooring.Interpolation())
    first = gpt()
    train(first, callback, 1, tmp_path, max_steps=2)
    with pytest.raises(MooringError, match=r"moors another model, .* \('.*' differs\): create a callback for each mod"):
        train(gpt(), callback, 1, tmp_path, max_steps=2)
    continued = gpt()
    continued.load_state_dict(first.state_dict())
    train(continued, callback, 2, tmp_path, max_steps=2)
    assert callback.moor.model is continued
    assert callback.moor.tasks == 3
