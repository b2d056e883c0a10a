"""Claims about moves: whatever parts devices have, each need gets its part. Actions are played with arrays here."""

from __future__ import annotations

import random
from itertools import pairwise, product

import numpy as np

from pipeline.plan.layouts.boxes import Box
from pipeline.plan.layouts.vectors import Kind
from pipeline.plan.programs.actions import Action, Add, Collective, Cut, Divide, Join, Receive, Send
from pipeline.plan.programs.moves import Move, Mover, Piece


def play(move: Move, held: dict[tuple[int, str], np.ndarray]) -> None:
    """Carry out what devices give and take, each in its order."""
    rows: dict[int, list[Action]] = {}
    for device, action in (*move.gives, *move.takes):
        rows.setdefault(device, []).append(action)
    sent = dict[int, np.ndarray]()
    while any(rows.values()):
        for device, row in rows.items():
            while row:
                action = row[0]
                match action:
                    case Cut():
                        held[device, action.output] = held[device, action.source][numbers(action.box)]
                    case Join():
                        parts = [held[device, name] for name in action.sources]
                        held[device, action.output] = np.concatenate(parts, action.axis)
                    case Add():
                        held[device, action.output] = np.sum([held[device, name] for name in action.sources], 0)
                    case Divide():
                        held[device, action.output] = held[device, action.source] / action.by
                    case Send():
                        sent[action.tag] = held[device, action.source]
                    case Receive():
                        if action.tag not in sent:
                            break
                        held[device, action.output] = sent.pop(action.tag)
                        assert held[device, action.output].shape == action.shape
                    case Collective():
                        heads = [rows[each][0] if rows[each] else None for each in action.devices]
                        calls = [head for head in heads if isinstance(head, Collective) and head.tag == action.tag]
                        if len(calls) < len(heads):
                            break
                        given = [held[each, call.source] for each, call in zip(action.devices, calls, strict=True)]
                        made = exchanged(action, given)
                        for each, call, value in zip(action.devices, calls, made, strict=True):
                            held[each, call.output] = value
                            if each != device:
                                rows[each].pop(0)
                    case _:
                        raise AssertionError(action)
                row.pop(0)
    assert not sent


def exchanged(call: Collective, given: list[np.ndarray]) -> list[np.ndarray]:
    n = len(given)
    match call.kind:
        case Kind.ALL_GATHER:
            return [np.concatenate(given, call.axis)] * n
        case Kind.ALL_REDUCE:
            return [np.sum(given, 0)] * n
        case Kind.REDUCE_SCATTER:
            return np.split(np.sum(given, 0), n, call.axis)
        case _:
            columns = zip(*(np.split(each, n, call.to_axis) for each in given), strict=True)
            return [np.concatenate(column, call.axis) for column in columns]


def numbers(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*side) for side in box)


def grid(rng: random.Random, shape: tuple[int, ...], *, even: bool) -> list[Box]:
    if even:
        edges = [[0, length // 2, length] if rng.random() < 0.5 else [0, length] for length in shape]
    else:
        edges = [sorted({0, length, rng.randrange(1, length)}) for length in shape]
    return list(product(*(list(pairwise(row)) for row in edges)))


def test_whatever_devices_have_each_need_gets_its_part() -> None:
    rng, arrays = random.Random(0), np.random.default_rng(0)
    kinds = set[type]()
    for number in range(400):
        even = number % 2 == 0
        shape = (4, 8) if even else (5, 3)
        whole = arrays.normal(size=shape)
        terms = [arrays.normal(size=shape) for _ in range(rng.choice([1, 1, 2, 3]))]
        terms[-1] = whole - sum(terms[:-1], np.zeros(shape))
        have, held = list[Piece](), dict[tuple[int, str], np.ndarray]()
        boxes = list(product(grid(rng, shape, even=even), range(len(terms))))
        devices, copies = rng.choice([1, 2, 4]), rng.choice([1, 1, 2])
        for place, (box, term) in enumerate(boxes * copies):
            piece = Piece(place % devices if even else rng.randrange(devices), f"x{place}", box, frozenset({term}))
            have.append(piece)
            held[piece.device, piece.value] = terms[term][numbers(box)]
        others = [rng.randrange(6) for _ in range(rng.choice([1, 2, 4]))]
        needs = [(device, rng.choice(grid(rng, shape, even=even))) for device in others]
        move = Mover().move("x", shape, have, needs)
        kinds |= {type(action) for _, action in (*move.gives, *move.takes)}
        play(move, held)
        for device, box in needs:
            np.testing.assert_allclose(held[device, move.values[device, box]], whole[numbers(box)], atol=1e-12)
    assert kinds >= {Cut, Join, Add, Send, Receive, Collective}


def test_a_term_that_two_devices_have_is_counted_once() -> None:
    box = ((0, 2),)
    terms = [np.array([1.0, 2.0]), np.array([10.0, 20.0]), np.array([100.0, 200.0])]
    where = [(0, 0), (0, 1), (1, 1), (1, 2)]
    have = [Piece(device, f"x{term}", box, frozenset({term})) for device, term in where]
    held = {(device, f"x{term}"): terms[term] for device, term in where}
    move = Mover().move("x", (2,), have, [(2, box)])
    play(move, held)
    assert held[2, move.values[2, box]].tolist() == [111.0, 222.0]
