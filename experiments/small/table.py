"""The table and the pictures of networks of three convolutions, from their records."""

from typing import NamedTuple

PLACE = "small.jsonl"


class Cell(NamedTuple):
    data: str
    network: str
    #: About how many parameters its networks have.
    size: int


class Row(NamedTuple):
    title: str
    #: Its convolutions.
    own: str
    #: As many epochs as take the training time of the dynamic network.
    equal_time: bool = False


ROWS = {
    "plain": Row("plain", "plain"),
    "dynamic": Row("dynamic diagonal `M`", "dynamic"),
    "plain_time": Row("plain, equal time", "plain", True),
    "plain_x4_time": Row("plain x4, equal time", "plain x4", True),
    "plain_x4": Row("plain x4", "plain x4"),
    "squeeze_excite": Row("squeeze-excite", "squeeze-excite"),
    "condconv": Row("CondConv", "CondConv"),
    "plain_x2_time": Row("plain x2, equal time", "plain x2", True),
    "plain_x2": Row("plain x2", "plain x2"),
}


def table(found):
    return str(len(found))


def pictures(found):
    return {}
