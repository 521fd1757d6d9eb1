"""A stranger of the kit knows another job's texts, with one thing of this job's in them."""

from __future__ import annotations

import json

from mkernel.conformance.nic_stranger_checks import _forged

HERS, OTHERS = "0123456789abcdef0123456789abcdef", "f" * 32


def test_a_text_that_is_place_and_key_at_once_keeps_its_place() -> None:
    assert list(_forged(json.dumps(HERS), json.dumps(OTHERS))) == [
        json.dumps("0123456789abcdef" + "f" * 16)
    ]
    assert list(_forged(HERS, OTHERS)) == ["0123456789abcdef" + "f" * 16]


def test_of_several_things_one_is_the_sessions_own() -> None:
    told = {"rank": 1, "lanes": [{"queue": 7, "key": 11}], "gid": "aa"}
    others = {"rank": 1, "lanes": [{"queue": 8, "key": 12}], "gid": "bb"}
    forged = [json.loads(text) for text in _forged(json.dumps(told), json.dumps(others))]
    assert forged == [
        {**others, "lanes": [{"queue": 7, "key": 12}]},
        {**others, "lanes": [{"queue": 8, "key": 11}]},
        {**others, "gid": "aa"},
    ]


def test_one_thing_alone_is_never_known_whole() -> None:
    assert list(_forged('{"queue": 7}', '{"queue": 8}')) == []
