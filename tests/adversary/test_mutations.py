"""Tests mutations: every place and value once, the same for the same seed, the original untouched."""

import copy
import random

from tests.adversary.mutations import HOSTILE_VALUES, leaves, mutations, several, sign_manifest

DOCUMENT = {"a": 1, "b": {"c": [1, {"d": None}], "e": {}}}


def test_every_place_meets_every_value_once_and_the_original_stays() -> None:
    before = copy.deepcopy(DOCUMENT)
    found = dict(mutations(DOCUMENT, random.Random(0)))
    assert before == DOCUMENT
    places = ["a", "b", "b.c", "b.c[0]", "b.c[1]", "b.c[1].d", "b.e"]
    # A value that is already there is no mutation: 1, None and the empty object.
    same = {"a = one", "b.c[0] = one", "b.c[1].d = null", "b.e = empty object"}
    wanted = {f"{place} = {name}" for place in places for name in HOSTILE_VALUES} - same
    wanted |= {f"{place} left out" for place in places} | {"b.c[0] repeated", "b.c[1] repeated"}
    assert set(found) == wanted
    assert found["b.c[1].d = 1e9"] == {"a": 1, "b": {"c": [1, {"d": 10**9}], "e": {}}}
    assert found["b.c[0] left out"]["b"]["c"] == [{"d": None}]
    assert [place for place, _ in leaves(DOCUMENT)] == [
        ("a",),
        ("b", "c", 0),
        ("b", "c", 1, "d"),
        ("b", "e"),
    ]


def test_a_seed_decides_and_places_can_be_chosen() -> None:
    first = [label for label, _ in mutations(DOCUMENT, random.Random(3), limit=5)]
    assert first == [label for label, _ in mutations(DOCUMENT, random.Random(3), limit=5)]
    assert first != [label for label, _ in mutations(DOCUMENT, random.Random(4), limit=5)]
    below = [label for label, _ in mutations(DOCUMENT, random.Random(0), under=[("b", "c")])]
    assert below and all(label.startswith("b.c[") for label in below)
    assert all(" and " in label for label, _ in several(DOCUMENT, random.Random(0), 2, 3))


def test_signed_manifests_have_the_checksum_of_their_content() -> None:
    signed = sign_manifest({"step": 3, "sha256": "old"})
    assert signed == sign_manifest(signed) and signed["sha256"] != "old"
