"""A transformer as operators, with its real sizes: what the programs of a learner's splits are made of."""

from __future__ import annotations

from pipeline.plan.programs.operators import Model, Operator
from pipeline.plan.transformer import Transformer

OF_HEADS = frozenset({"q", "k", "v", "q_norm", "k_norm", "attend", "out"})
"""What is cut along ``g``, the heads of keys, where the ranks of a share split a layer."""
OF_INNER = frozenset({"gate", "up", "mul", "down"})
"""What is cut along ``f``."""


def decoder(of: Transformer, sequences: int, *, layers: int = 1, parts: int = 1) -> Model:
    """Return a decoder with so many layers, for sequences of one token. An operator of layer 0 is called ``0.q`` or alike.

    The hidden size is rounded up to a multiple of ``parts``, as torch and DeepSpeed fill up what does not divide."""
    b, k = sequences, -(-of.hidden // parts) * parts
    g, r, w, f, e = of.key_heads, of.heads // of.key_heads, of.head_dim, of.intermediate, of.experts
    shapes: dict[str, tuple[int, ...]] = {"tokens": (b, 1), "targets": (b, 1), "table": (of.vocabulary, k)}
    data, operators = tuple(list(shapes)[:2]), list[Operator]()

    def add(name: str, kind: str, rule: str, *inputs: str, size: tuple[int, ...]) -> str:
        operators.append(Operator(name, kind, rule, inputs, f"{name}.out"))
        shapes[f"{name}.out"] = size
        return f"{name}.out"

    def weight(name: str, *size: int) -> str:
        shapes[name] = size
        return name

    def norm(name: str, states: str) -> str:
        return add(name, "norm", "b s k^, k^ -> b s k^", states, weight(f"{name}.weight", k), size=(b, 1, k))

    states = add("embed", "embed", "b s, v+ k -> b s k", "tokens", "table", size=(b, 1, k))
    for i in range(layers):
        normed = norm(f"{i}.norm", states)
        q, keys, values = (
            add(f"{i}.{n}", "project", f"b s k+, k+ {dims} -> b s {dims}", normed, weight(f"{i}.{n}.weight", k, *size),
                size=(b, 1, *size))
            for n, dims, size in (("q", "g r w", (g, r, w)), ("k", "g w", (g, w)), ("v", "g w", (g, w)))
        )  # fmt: skip
        if of.norms > 2 * of.hidden:
            q = add(f"{i}.q_norm", "norm", "b s g r w^, w^ -> b s g r w^", q, weight(f"{i}.q_norm.weight", w),
                    size=(b, 1, g, r, w))  # fmt: skip
            keys = add(f"{i}.k_norm", "norm", "b s g w^, w^ -> b s g w^", keys, weight(f"{i}.k_norm.weight", w),
                       size=(b, 1, g, w))  # fmt: skip
        rule = "b s^ g r w^, b s^ g w^, b s^ g w^ -> b s^ g r w^"
        mixed = add(f"{i}.attend", "attention", rule, q, keys, values, size=(b, 1, g, r, w))
        out = add(f"{i}.out", "out", "b s g+ r+ w+, g+ r+ w+ k -> b s k", mixed, weight(f"{i}.out.weight", g, r, w, k),
                  size=(b, 1, k))  # fmt: skip
        if of.biases:
            # all of a layer's in one place
            bias = weight(f"{i}.bias", of.biases)
            out = add(f"{i}.shift", "shift", "b s k, z^ -> b s k", out, bias, size=(b, 1, k))
        states = add(f"{i}.add", "add", "b s k, b s k -> b s k", states, out, size=(b, 1, k))
        normed = norm(f"{i}.norm2", states)
        if e:
            weights = [weight(f"{i}.router", k, e), weight(f"{i}.gate", e, k, f), weight(f"{i}.up", e, k, f)]
            rule = "b s k^, k^ e^, e^ k^ f^, e^ k^ f^, e^ f^ k^ -> b s k^"
            down = add(f"{i}.experts", "experts", rule, normed, *weights, weight(f"{i}.down", e, f, k), size=(b, 1, k))
        else:
            rule = "b s k+, k+ f -> b s f"
            gate, up = (
                add(f"{i}.{n}", "linear", rule, normed, weight(f"{i}.{n}.weight", k, f), size=(b, 1, f))
                for n in ("gate", "up")
            )
            both = add(f"{i}.mul", "gated", "b s f, b s f -> b s f", gate, up, size=(b, 1, f))
            down = add(f"{i}.down", "linear", "b s f+, f+ k -> b s k", both, weight(f"{i}.down.weight", f, k),
                       size=(b, 1, k))  # fmt: skip
        states = add(f"{i}.add2", "add", "b s k, b s k -> b s k", states, down, size=(b, 1, k))
    states = norm("last", states)
    head = "table" if of.is_tied else weight("head.weight", of.vocabulary, k)
    logits = add("head", "head", "b s k+, v k+ -> b s v", states, head, size=(b, 1, of.vocabulary))
    loss = add("loss", "loss", "b+ s+ v^, b+ s+ ->", logits, "targets", size=())
    parameters = tuple(name for name in shapes if name not in data and not name.endswith(".out"))
    return Model(shapes, parameters, data, tuple(operators), loss).check()
