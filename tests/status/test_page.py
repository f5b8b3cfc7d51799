"""The page: whole without script, safe with hostile text, closed by its policy."""

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest

from wavekeeper.coordinator.core.view import FleetView
from wavekeeper.coordinator.status import page
from wavekeeper.coordinator.status.app import make_app
from wavekeeper.coordinator.status.page import Html, tag
from wavekeeper.coordinator.status.report import status_of
from wavekeeper.proto.messages import Kind, Mode, Phase

from .fakes import (
    HOSTILE,
    Service,
    ask,
    busy_fleet,
    dense,
    deployment_view,
    faulted_moe,
    fleet_view,
    hostile_fleet,
    moe,
    rank_view,
    service_info,
    without,
)

VOID = {"meta", "link"}


class Reader(HTMLParser):
    """Reads a page as strictly as it was written: every element is closed, in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.blocks: dict[str, str] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == [], f"left open: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"<{tag}> has an attribute twice"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("style", "script"):
            self.blocks[self._open[-1]] = self.blocks.get(self._open[-1], "") + data
        elif data.strip():
            self.words.append(data)


def read(fleet: FleetView, **info: object) -> Reader:
    return Reader(page.render(status_of(fleet, service_info(**info))))


def test_the_route_serves_html_with_the_policy() -> None:
    answer = ask(make_app(Service()), "/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.text == page.render(status_of(busy_fleet(), service_info()))
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_a_card_tells_phase_wave_epoch_exchange_load_and_ranks() -> None:
    words = read(fleet_view(moe())).words
    text = " | ".join(words)
    assert "running for 12 s" in words
    for name, value in {"wave": "12", "epoch": "1", "running": "3", "waiting": "1", "ranks up": "4 of 4"}.items():
        assert f"{name} | {value}" in text
    assert "exchange: shm (the first that all ranks offer; they are on 1 host)" in words
    assert "coordination cost: group operations 480, process groups 0, wave messages 140" in words


def test_a_dense_card_shows_its_zeros_and_no_wave() -> None:
    words = read(fleet_view(dense())).words
    assert "coordination cost: group operations 0, process groups 0, wave messages 0" in words
    assert "wave" not in words
    assert not any(word.startswith("exchange") for word in words)


def test_the_grid_has_a_tile_for_each_rank_with_its_state() -> None:
    tiles = [attributes for tag, attributes in read(fleet_view(faulted_moe())).tags if tag == "li"]
    assert [tile["class"] for tile in tiles] == ["run", "run", "run", "bad gone"]
    assert tiles[2]["title"] == (
        "rank 2: running, stepping for 0.0 s, wave 12 step 34, 3 running, 1 waiting, KV cache 42 %, heard 0.2 s ago"
    )
    assert tiles[3]["title"] == "rank 3 is not there"


def test_what_it_waits_for_and_who_waits_are_told() -> None:
    words = read(fleet_view(faulted_moe(), without(dense(), 1))).words
    assert "not ready" in words
    assert "faulted (rank 3 fell silent for 5.0 s); waits for rank 3 to register, since 2.0 s" in words
    assert "a start waits for 1.5 s, asked for by front-end 00000000000000aa" in words
    assert "demo-dense has 3 of 4 ranks" in words


def test_a_coordinator_that_stops_says_so() -> None:
    assert "the coordinator is stopping" in read(busy_fleet(), stopping=True).words


@pytest.mark.parametrize("phase", Phase)
def test_every_phase_has_its_chip(phase: Phase) -> None:
    assert f"{phase} for 12 s" in read(fleet_view(moe(phase=phase))).words


@pytest.mark.parametrize("mode", Mode)
def test_every_mode_has_its_tile(mode: Mode) -> None:
    assert mode in read(fleet_view(deployment_view("a", Kind.MOE, [rank_view(0, mode=mode)]))).words


def test_large_deployments_get_small_tiles_and_a_short_table() -> None:
    found = read(fleet_view(deployment_view("big", Kind.MOE, [rank_view(rank) for rank in range(200)])))
    assert sum(tag == "li" for tag, _ in found.tags) == 200
    assert sum(tag == "tr" for tag, _ in found.tags) == 1 + page.TABLE_RANKS_MAX
    assert "every rank (the first 64; all are in /v1/deployments/big)" in found.words


def test_hostile_text_stays_text() -> None:
    usual, hostile = read(fleet_view(faulted_moe())), read(hostile_fleet(), control=HOSTILE, version=HOSTILE)
    assert {tag for tag, _ in hostile.tags} <= {tag for tag, _ in usual.tags}
    assert not [name for _, attributes in hostile.tags for name in attributes if name.startswith("on")]
    # Host, address, incarnation, attribute; what it waits for, the fault, the start, the exchange; control and version.
    assert sum(HOSTILE in word for word in hostile.words) >= 10


def test_a_tag_escapes_children_and_attributes_but_not_tags() -> None:
    assert tag("b", HOSTILE) == "<b>&lt;img src=x onerror=&quot;alert(1)&quot;&gt;&#x27;&amp;\x1b[2J</b>"
    assert tag("b", title='"><i>') == '<b title="&quot;&gt;&lt;i&gt;"></b>'
    assert tag("p", tag("b", "<"), 1, class_="x", aria_hidden="true") == (
        '<p class="x" aria-hidden="true"><b>&lt;</b>1</p>'
    )
    assert isinstance(tag("b"), Html)


def test_the_policy_allows_the_style_and_the_script_of_the_page_and_nothing_else() -> None:
    policy = dict(part.strip().split(" ", 1) for part in page.HEADERS["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'"
    blocks = read(busy_fleet()).blocks
    for kind in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256(blocks[kind].encode()).digest()).decode()
        assert policy[f"{kind}-src"] == f"'sha256-{digest}'", "no other source, and none that is unsafe"
    assert policy["connect-src"] == "'self'"


def test_the_page_uses_nothing_that_its_policy_forbids_and_nothing_from_elsewhere() -> None:
    for tag_, attributes in read(fleet_view(faulted_moe(), dense())).tags:
        assert "style" not in attributes
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("src", "href"):
            assert not re.match(r"\w+://|//", attributes.get(name) or ""), f"<{tag_}> loads from elsewhere"


def test_without_script_the_page_refreshes_itself_and_is_made_for_small_screens_and_the_dark() -> None:
    text = page.render(status_of(busy_fleet(), service_info()))
    assert '<noscript><meta http-equiv="refresh" content="5"></noscript>' in text
    assert '<meta name="viewport" content="width=device-width,initial-scale=1">' in text
    assert "prefers-color-scheme:dark" in text


def test_the_page_is_small() -> None:
    assert len(page.render(status_of(busy_fleet(), service_info()))) < 20_000
