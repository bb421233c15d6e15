"""Tests of LoRA on bases that bitsandbytes quantized; they run where it is installed, also on a CPU."""

import pytest
import torch

import mooring

pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
transformers = pytest.importorskip("transformers", reason="needs transformers")
peft = pytest.importorskip("peft", reason="needs peft")

QUANTIZED = {
    "4 bits": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32},
    "8 bits": {"load_in_8bit": True},
}


def quantized_llama(folder, bits):
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    quantization = transformers.BitsAndBytesConfig(**QUANTIZED[bits])
    model = transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=quantization, device_map="cpu")
    model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def batches(count, seed):
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(100, (4, 16), generator=generator) for _ in range(count)]
    return [{"input_ids": tokens, "labels": tokens} for tokens in drawn]


@pytest.mark.parametrize("bits", QUANTIZED)
def test_lora_on_a_quantized_base_is_held_by_its_product(tmp_path, bits):
    model = quantized_llama(tmp_path, bits)
    base = [p.clone() for p in model.parameters() if not p.requires_grad]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    moor = mooring.attach(model, optimizer, reference=batches(4, 1), pull=mooring.Budget(1e-3), progress=False)
    assert {entry.how for entry in moor.coverage().held} == {"product"}
    for batch in batches(12, 2):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    assert moor.finish().nats <= 1e-3 * (1 + 1e-4)
    assert moor.pull_energy() > 0
    assert all(map(torch.equal, base, (p for p in model.parameters() if not p.requires_grad)))
