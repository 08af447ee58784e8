"""The recipe renders what a server sends, learns, and exports what a server loads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from capserve.engine.runtime import TorchEngine
from capserve.nano import checkpoint_dir
from recipes.nano.dialogs import Loss, Renderer, make_sample
from recipes.nano.evaluate import reply, turns
from recipes.nano.export import export
from recipes.nano.model import Batch, MtpChain, Nano, delta_rule
from recipes.nano.pack import Packer, encode
from recipes.nano.tokenizer import train_tokenizer
from recipes.nano.train import Plan, Progress, train
from recipes.nano.words import Rng


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from more, and lose much where the cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint_dir() / "tokenizer.json"))


def nano_config() -> dict[str, Any]:
    config: dict[str, Any] = json.loads((checkpoint_dir() / "config.json").read_text())
    return config


def minute_config() -> dict[str, Any]:
    """The same kinds of layers, as small as they go."""
    return nano_config() | {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 16,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }


def test_rendered_dialogs_equal_the_checkpoints_own_template_token_for_token(
    tokenizer: Tokenizer,
) -> None:
    library = AutoTokenizer.from_pretrained(checkpoint_dir())
    rng, renderer = Rng("render"), Renderer()
    kinds = set()
    for _ in range(60):
        sample = make_sample(rng)
        ids, classes = encode(tokenizer, renderer.pieces(sample))
        expected = library.apply_chat_template(
            sample.messages,
            tools=sample.tools,
            preserve_thinking=sample.preserve_thinking,
            tokenize=True,
            return_dict=False,
        )
        assert ids == expected
        kinds |= set(classes)
    assert kinds == {Loss.PROMPT, Loss.REPLY}


def test_what_counts_as_reply_is_what_the_model_writes_and_nothing_else() -> None:
    rng, renderer = Rng("classes"), Renderer()
    for _ in range(60):
        sample = make_sample(rng)
        pieces = renderer.pieces(sample)
        assert "".join(text for text, _ in pieces) == renderer.text(sample)
        replies = [text for text, kind in pieces if kind is Loss.REPLY]
        assistant = [m for m in sample.messages if m["role"] == "assistant"]
        assert len(replies) == len(assistant)
        for text, message in zip(replies, assistant, strict=True):
            assert text.endswith("<|im_end|>")
            assert message["content"].strip() in text
            assert text.count("<tool_call>") == len(message.get("tool_calls", ()))
        assert not any("<|im_start|>" in text for text in replies)


def test_rows_are_full_and_know_where_their_documents_begin(tokenizer: Tokenizer) -> None:
    rows = next(Packer(tokenizer, "rows", 1024, code_files=3).batches(2))
    assert rows.ids.shape == rows.loss.shape == rows.start.shape == (2, 1024)
    assert set(np.unique(rows.loss)) == {Loss.PROMPT, Loss.REPLY, Loss.CODE}
    for start in rows.start:
        assert (np.diff(start) >= 0).all()
        assert all(start[begin] == begin for begin in np.unique(start))


def test_the_chunked_delta_rule_is_the_recurrence_it_stands_for() -> None:
    torch.manual_seed(0)
    batch, length, heads, width = 2, 150, 3, 8
    q, k, v = (torch.randn(batch, length, heads, width) for _ in range(3))
    g, beta = -torch.rand(batch, length, heads), torch.rand(batch, length, heads)
    fast = delta_rule(q, k, v, g, beta)
    q = torch.nn.functional.normalize(q, dim=-1) * width**-0.5
    k = torch.nn.functional.normalize(k, dim=-1)
    state = torch.zeros(batch, heads, width, width)
    for t in range(length):
        state = state * g[:, t, :, None, None].exp()
        known = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        write = beta[:, t, :, None] * (v[:, t] - known)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], write)
        slow = torch.einsum("bhkv,bhk->bhv", state, q[:, t])
        torch.testing.assert_close(fast[:, t], slow, atol=1e-5, rtol=1e-4)


def test_documents_in_a_row_do_not_see_each_other(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    net = Nano(minute_config()).eval()
    first, second = torch.randint(0, 8000, (1, 90)), torch.randint(0, 8000, (1, 70))
    row = torch.cat([first, second], 1)
    start = torch.cat([torch.zeros(1, 90), torch.full((1, 70), 90)], 1).long()
    with torch.no_grad():
        together, deeper = net(Batch(row, start), 2)
        alone, alone_deeper = net(Batch(second, torch.zeros_like(second)), 2)
    torch.testing.assert_close(together[:, 90:], alone, atol=1e-5, rtol=1e-4)
    # The last slots of the head read tokens beyond the document: they have no target either.
    for x, y in zip(deeper, alone_deeper, strict=True):
        torch.testing.assert_close(x[:, 90:-2], y[:, :-2], atol=1e-5, rtol=1e-4)


def test_the_first_depth_of_the_mtp_chain_is_plain_causal_attention() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 6, 4) for _ in range(3))
    mask = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(MtpChain().attend(q, k, v, mask), plain)


def test_a_minute_model_learns_and_is_exported_as_capserve_loads_it(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    config, steps = minute_config(), list[Progress]()
    plan = Plan(
        seconds=600,
        rows=2,
        length=256,
        rate=2e-2,
        warmup_steps=2,
        mtp_depth=2,
        code_files=3,
        max_steps=12,
    )
    net = train(config, tokenizer, plan, steps.append)
    assert len(steps) == 12
    assert steps[-1].loss < steps[0].loss - 1
    assert steps[-1].mtp_loss < steps[0].mtp_loss - 1

    export(net, config, checkpoint_dir(), tmp_path)
    engine = TorchEngine.load(tmp_path)
    prompt, _ = turns(1)[0]
    text, drafted, accepted = reply(engine, tokenizer, prompt)
    assert text
    assert 0 <= accepted <= drafted


def test_the_recipes_network_has_exactly_nanos_tensors() -> None:
    with torch.device("meta"):
        net = Nano(nano_config())
    index = json.loads((checkpoint_dir() / "model.safetensors.index.json").read_text())
    shapes = {name: list(tensor.shape) for name, tensor in net.state_dict().items()}
    assert shapes.keys() == index["weight_map"].keys()
    for file in set(index["weight_map"].values()):
        raw = (checkpoint_dir() / file).read_bytes()
        table = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        table.pop("__metadata__", None)
        for name, entry in table.items():
            assert entry["shape"] == shapes[name], name


def test_the_shipped_weights_run_in_the_recipes_network_as_in_the_engine() -> None:
    """The twin is the same function: greedy tokens of trunk and engine agree."""
    from safetensors.torch import load_file

    weights: dict[str, torch.Tensor] = {}
    for file in sorted(checkpoint_dir().glob("*.safetensors")):
        weights |= load_file(file)
    net = Nano(nano_config()).eval()
    net.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    library = Tokenizer.from_file(str(checkpoint_dir() / "tokenizer.json"))
    prompt, _ = turns(1)[0]
    ids = torch.tensor([library.encode(prompt, add_special_tokens=False).ids])
    with torch.no_grad():
        hidden, _ = net(Batch(ids, torch.zeros_like(ids)), 0)
        first = int(net.logits(hidden[0, -1]).argmax())
    text, _, _ = reply(TorchEngine.load(checkpoint_dir()), library, prompt)
    assert library.encode(text, add_special_tokens=False).ids[0] == first


def test_a_new_vocabulary_keeps_the_familys_layout(tokenizer: Tokenizer) -> None:
    made = train_tokenizer(dialogs=40, code_files=3)
    size = made.get_vocab_size()
    marks = sorted(made.get_added_tokens_decoder().items())
    shipped = sorted(tokenizer.get_added_tokens_decoder().items())
    assert [token.content for _, token in marks] == [token.content for _, token in shipped]
    assert [id_ for id_, _ in marks] == list(range(size - len(marks), size))
    text = "<|im_start|>user\nRun 12 tests…<|im_end|>\n"
    ids = made.encode(text, add_special_tokens=False).ids
    assert made.decode(ids, skip_special_tokens=False) == text
    assert size <= tokenizer.get_vocab_size()
