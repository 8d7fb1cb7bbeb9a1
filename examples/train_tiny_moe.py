"""Train a small sparse model on the CPU in about two minutes, and write it as a qwen3_moe checkpoint.

usage: python examples/train_tiny_moe.py FOLDER [--text FILE] [--steps 400] [--trace routing.json] ...

Then, for example: firstlayer generate FOLDER --prompt "The value of" --max-tokens 64. Its tokens are bytes. The text,
unless one is given, is what Python's own documentation says of the language. `--trace` writes which experts a part of
the text that was not trained on is routed to, token by token, for examples/compare_expert_policies.py; and which ones
each layer's input would choose in the layer behind it, so that looking ahead can be measured.

B sequences of T tokens, D hidden size, H heads (K of keys and values) of d numbers, E experts, k of them for a token.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

VOCAB = 256  # bytes
BALANCE = 0.01  # weight of the loss that keeps experts in use (Switch Transformer, section 2.2)
EPS = 1e-6
THETA = 10000.0


@dataclass(frozen=True)
class TinyMoE:
    """What to train, and how long."""

    layers: int = 6
    hidden_size: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 24
    experts: int = 32
    chosen: int = 2
    expert_size: int = 96
    steps: int = 400
    batch: int = 12
    length: int = 96
    seed: int = 0


@dataclass(frozen=True)
class Routing:
    """One layer's choice for every token [B * T, k], and what its input chooses in the next sparse layer."""

    chosen: torch.Tensor
    foreseen: torch.Tensor | None


class Layer(nn.Module):
    """Attention and experts, each behind a norm and added to what came in. Names are those of the checkpoint."""

    def __init__(self, model: TinyMoE) -> None:
        super().__init__()
        self.model = model
        wide, narrow = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self.q_proj, self.o_proj = _weight(wide, model.hidden_size), _weight(model.hidden_size, wide)
        self.k_proj, self.v_proj = _weight(narrow, model.hidden_size), _weight(narrow, model.hidden_size)
        self.q_norm, self.k_norm = (nn.Parameter(torch.ones(model.head_dim)) for _ in range(2))
        self.input_norm, self.mlp_norm = (nn.Parameter(torch.ones(model.hidden_size)) for _ in range(2))
        self.gate = _weight(model.experts, model.hidden_size)
        self.gate_proj, self.up_proj = (_weights(model, model.expert_size, model.hidden_size) for _ in range(2))
        self.down_proj = _weights(model, model.hidden_size, model.expert_size)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, T, D] -> [B, T, D]."""
        model, (batch, length, _) = self.model, x.shape
        normed = _normed(x, self.input_norm)
        q, k, v = (
            functional.linear(normed, weight).view(batch, length, -1, model.head_dim).transpose(1, 2)
            for weight in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = _rotated(_normed(q, self.q_norm)), _rotated(_normed(k, self.k_norm))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return functional.linear(mixed.transpose(1, 2).reshape(batch, length, -1), self.o_proj)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [n, D] -> all scores [n, E], the weights of the chosen and their numbers, both [n, k]."""
        scores = functional.linear(x, self.gate).softmax(-1)
        best, chosen = scores.topk(self.model.chosen, dim=-1)
        return scores, best / best.sum(-1, keepdim=True), chosen

    def mix(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """x [n, D] through its experts: [n, D]."""
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            tokens, places = (chosen == expert).nonzero(as_tuple=True)
            some = x[tokens]
            inner = functional.silu(some @ self.gate_proj[expert].T) * (some @ self.up_proj[expert].T)
            out = out.index_add(0, tokens, inner @ self.down_proj[expert].T * weights[tokens, places].unsqueeze(1))
        return out


class Model(nn.Module):
    """The whole: bytes in, logits of the next byte out."""

    def __init__(self, model: TinyMoE) -> None:
        super().__init__()
        self.model = model
        self.embed, self.head = (nn.Parameter(0.02 * torch.randn(VOCAB, model.hidden_size)) for _ in range(2))
        self.blocks = [Layer(model) for _ in range(model.layers)]
        self.layers = nn.ModuleList(self.blocks)
        self.norm = nn.Parameter(torch.ones(model.hidden_size))

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[Routing]]:
        """ids int64 [B, T] -> logits [B, T, 256], the loss of balance, the routing of each layer."""
        x = self.embed[ids]
        balance, found = x.new_zeros(()), []
        for number, layer in enumerate(self.blocks):
            x = x + layer.attend(x)
            flat = _normed(x, layer.mlp_norm).flatten(0, 1)
            scores, weights, chosen = layer.route(flat)
            share = functional.one_hot(chosen, self.model.experts).float().mean((0, 1))
            balance = balance + self.model.experts * (share * scores.mean(0)).sum() / self.model.layers
            after = self.blocks[number + 1] if number + 1 < len(self.blocks) else None
            with torch.no_grad():
                found.append(Routing(chosen, None if after is None else after.route(flat)[2]))
            x = x + layer.mix(flat, weights, chosen).view_as(x)
        return functional.linear(_normed(x, self.norm), self.head), balance, found


def train(model: TinyMoE, text: torch.Tensor) -> Model:
    """A model trained on text, int64 [n]. Prints how it goes."""
    torch.manual_seed(model.seed)
    net = Model(model)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.05)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=max(2, model.steps), pct_start=0.1)
    begin_s = time.monotonic()
    for step in range(model.steps):
        starts = torch.randint(0, text.shape[0] - model.length - 1, (model.batch,))
        part = torch.stack([text[start : start + model.length + 1] for start in starts.tolist()])
        logits, balance, _ = net(part[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())
        optimizer.zero_grad()
        (loss + BALANCE * balance).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        rates.step()
        if step % 50 == 0 or step == model.steps - 1:
            print(f"step {step:4d}: loss {loss.item():.3f} nats a byte, {time.monotonic() - begin_s:.0f} s", flush=True)
    return net


def routing(net: Model, text: torch.Tensor) -> dict[str, Any]:
    """Which experts the text's tokens are routed to: for each token, for each layer, `chosen` and `foreseen`."""
    chosen: list[list[list[int]]] = []
    foreseen: list[list[list[int]]] = []
    with torch.no_grad():
        for part in text.split(net.model.length):
            _, _, layers = net(part.unsqueeze(0))
            for token in range(part.shape[0]):
                chosen.append([one.chosen[token].tolist() for one in layers])
                foreseen.append([one.foreseen[token].tolist() for one in layers if one.foreseen is not None])
    return {"experts": net.model.experts, "chosen": chosen, "foreseen": foreseen}


def write_checkpoint(net: Model, folder: Path) -> None:
    """config.json, tokenizer.json and model.safetensors, in the names that published checkpoints have."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in _named(net)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_of(net.model), indent=2) + "\n", encoding="utf-8")
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer()) + "\n", encoding="utf-8")


def config_of(model: TinyMoE) -> dict[str, Any]:
    """The config.json."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": model.hidden_size,
        "num_hidden_layers": model.layers, "num_attention_heads": model.heads, "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim, "intermediate_size": model.expert_size, "vocab_size": VOCAB, "hidden_act": "silu",
        "num_experts": model.experts, "num_experts_per_tok": model.chosen, "norm_topk_prob": True,
        "moe_intermediate_size": model.expert_size, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "rms_norm_eps": EPS, "rope_theta": THETA, "max_position_embeddings": 4096, "tie_word_embeddings": False,
        "attention_bias": False, "use_sliding_window": False, "torch_dtype": "float32", "bos_token_id": None,
        "eos_token_id": None,
    }  # fmt: skip


def _named(net: Model) -> Iterator[tuple[str, torch.Tensor]]:
    yield "model.embed_tokens.weight", net.embed.detach()
    for number, layer in enumerate(net.blocks):
        prefix = f"model.layers.{number}."
        yield f"{prefix}input_layernorm.weight", layer.input_norm.detach()
        yield f"{prefix}post_attention_layernorm.weight", layer.mlp_norm.detach()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
            yield f"{prefix}self_attn.{name}.weight", layer.get_parameter(name).detach()
        yield f"{prefix}mlp.gate.weight", layer.gate.detach()
        for name in ("gate_proj", "up_proj", "down_proj"):
            for expert, weight in enumerate(layer.get_parameter(name).detach()):
                yield f"{prefix}mlp.experts.{expert}.{name}.weight", weight
    yield "model.norm.weight", net.norm.detach()
    yield "lm_head.weight", net.head.detach()


def _tokenizer() -> dict[str, Any]:
    """Bytes, each a token of its own number, in the spelling of byte-level vocabularies."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    vocab = {chr(byte if byte in plain else next(others)): byte for byte in range(VOCAB)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": level, "post_processor": None, "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }  # fmt: skip


def _weight(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) / columns**0.5)


def _weights(model: TinyMoE, rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(model.experts, rows, columns) / columns**0.5)


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, weight.shape, weight, EPS)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """x [B, H, T, d] under rotary positions, halves of d turned against each other (RoFormer, as Qwen has it)."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[-2]), THETA ** (-torch.arange(half) / half))
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def documentation() -> bytes:
    """What Python's documentation says of the language: about half a million bytes of prose and code."""
    from pydoc_data import topics

    return "\n".join(str(topics.topics[name]) for name in sorted(topics.topics)).encode()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train a small sparse model and write its checkpoint.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", type=Path, help="what to train on; unless given, Python's documentation")
    parser.add_argument("--trace", type=Path, help="write the routing of a part that was not trained on")
    parser.add_argument("--trace-tokens", type=int, default=1536)
    for option in fields(TinyMoE):
        parser.add_argument(f"--{option.name.replace('_', '-')}", type=int, default=option.default)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = _parser()
    options = vars(parser.parse_args(arguments))
    folder, file, trace, tokens = (options.pop(name) for name in ("folder", "text", "trace", "trace_tokens"))
    text = torch.frombuffer(bytearray(documentation() if file is None else file.read_bytes()), dtype=torch.uint8).long()
    model = TinyMoE(**options)
    if text.shape[0] < 2 * model.length + tokens:
        parser.error(f"the text of {text.shape[0]} bytes is too short for {tokens} bytes of trace and training")
    torch.set_num_threads(1)  # products so small are no faster with more
    net = train(model, text[: text.shape[0] - tokens])
    write_checkpoint(net, folder)
    print(f"wrote {folder}")
    if trace is not None:
        trace.write_text(json.dumps(routing(net, text[-tokens:])), encoding="utf-8")
        print(f"wrote {trace}")


if __name__ == "__main__":
    main()
