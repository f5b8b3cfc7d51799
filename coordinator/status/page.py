"""One view of the fleet -> one HTML page, for people.

The law of this file: the page is whole when it leaves here. It needs no other file (air-gapped sites load nothing from
elsewhere), and no script: the few lines of script fetch the same page again and bring the shown one up to it in place,
so what is seen is always what `render` made. (Drawing from /v1/status in the browser would be a second renderer.)
Every text becomes HTML in `tag`, which escapes it: attributes, hosts and reasons are written by strangers. The policy
in `HEADERS` allows the style and the script below by their hashes and nothing else, so there is no `style=` either.
"""

import base64
import hashlib
import html
from collections.abc import Iterable

from ...proto.messages import Activity
from ..core.view import DeploymentView, RankView
from .report import Status, coordination_cost, duration, exchange_words, last_share, percent, readiness

TABLE_RANKS_MAX = 64
"""Ranks with a row of their own; the grid shows all, and larger tables are for machines."""
SMALL_TILES_FROM = 33
"""From so many ranks on, a tile shows the number alone."""

_STYLE = """
:root{color-scheme:light dark;--bg:#f5f6f8;--card:#fff;--text:#1b2430;--dim:#5d6b7c;--line:#dfe4ea;--soft:#eef1f5;
--good:#1a7f4b;--run:#1f6feb;--warn:#9a6700;--bad:#c62a2f;--held:#7c4dce}
@media (prefers-color-scheme:dark){:root{--bg:#0f141a;--card:#171e27;--text:#e4e9ef;--dim:#94a3b4;--line:#2b3542;
--soft:#1f2833;--good:#4cc38a;--run:#6cb0ff;--warn:#e3b341;--bad:#ff7b72;--held:#bc9cff}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--text);
font:15px/1.45 system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main,footer,#stale{max-width:1180px;margin:0 auto;padding:16px}
header,h2{display:flex;flex-wrap:wrap;align-items:center;gap:6px 12px}
h1,h2{font-size:20px;line-height:1.3;margin:0}h2{font-size:17px;overflow-wrap:anywhere}
.dim,footer{color:var(--dim);font-size:13px;font-weight:400}
.chip{font-size:13px;font-weight:600;padding:1px 10px;border-radius:99px;border:1px solid;white-space:nowrap}
.good{color:var(--good)}.run{color:var(--run)}.warn{color:var(--warn)}.bad{color:var(--bad)}.held{color:var(--held)}
.note{margin:10px 0 0;padding:6px 12px;border-left:3px solid;background:var(--soft);overflow-wrap:anywhere}
.note span{color:var(--text)}
section{margin-top:16px;padding:16px;background:var(--card);border:1px solid var(--line);border-radius:10px}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(88px,1fr));gap:10px 16px;margin:14px 0}
dt{color:var(--dim);font-size:12px}dd{margin:0;font-size:17px;font-variant-numeric:tabular-nums}
ol{list-style:none;margin:14px 0 0;padding:0;display:grid;gap:6px;
grid-template-columns:repeat(auto-fill,minmax(84px,1fr))}
ol.small{grid-template-columns:repeat(auto-fill,minmax(38px,1fr));gap:3px}
li{border:1px solid;border-radius:6px;padding:4px 8px 6px;min-width:0;background:var(--soft)}
li.gone{border-style:dashed;background:none}
li b,li span{display:block;overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
li span{font-size:12px;color:var(--text);font-variant-numeric:tabular-nums}
ol.small li{padding:2px 4px 4px;text-align:center;font-size:12px}
svg{display:block;width:100%;height:4px;margin-top:4px;background:var(--line);border-radius:2px;fill:currentColor}
details{margin-top:12px}summary{cursor:pointer;color:var(--dim);font-size:13px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:13px;margin-top:8px;white-space:nowrap;font-variant-numeric:tabular-nums}
th,td{padding:3px 14px 3px 0;text-align:left;border-bottom:1px solid var(--line)}
th{color:var(--dim);font-weight:500}.n{text-align:right}
a{color:var(--run)}footer a{margin-right:12px}footer div{overflow-wrap:anywhere}
#stale{display:none;color:var(--bad);font-weight:600;padding-bottom:0}.stale #stale{display:block}
.stale main{opacity:.55}
"""

_SCRIPT = """
function morph(old, fresh) {
  if (old.nodeName !== fresh.nodeName) return old.replaceWith(fresh);
  if (old.nodeType === Node.TEXT_NODE) { if (old.data !== fresh.data) old.data = fresh.data; return; }
  for (const {name, value} of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  for (const {name} of [...old.attributes]) if (name !== "open" && !fresh.hasAttribute(name)) old.removeAttribute(name);
  const before = [...old.childNodes], after = [...fresh.childNodes];
  after.forEach((node, i) => before[i] ? morph(before[i], node) : old.append(node));
  before.slice(after.length).forEach(node => node.remove());
}
async function refresh() {
  if (!document.hidden) try {
    const answer = await fetch(location.pathname, {cache: "no-store", signal: AbortSignal.timeout(4000)});
    if (!answer.ok) throw answer.status;
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    document.title = fresh.title;
    morph(document.querySelector("main"), fresh.querySelector("main"));
    document.body.classList.remove("stale");
  } catch { document.body.classList.add("stale"); }
  setTimeout(refresh, 1500);
}
setTimeout(refresh, 1500);
"""


def _allowed(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; style-src {_allowed(_STYLE)}; script-src {_allowed(_SCRIPT)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
}

_TONES = {
    **dict.fromkeys(("serving", "idle"), "good"),
    "running": "run",
    **dict.fromkeys(("gathering", "joining", "forming", "starting"), "warn"),
    **dict.fromkeys(("holding", "held", "resuming"), "held"),
    **dict.fromkeys(("faulted", "halted"), "bad"),
}
"""Phase or mode -> colour. The word itself stands beside every colour, or in the tile's title."""


class Html(str):
    """Text that is HTML already. Made by `tag` and by nothing that handles data."""


def tag(name: str, *children: object, **attributes: str | int) -> Html:
    """Return an element. Children and attribute values are escaped unless they are `Html`.

    In an attribute's name a trailing underscore is dropped (`class_`) and any other becomes a hyphen (`aria_hidden`).
    """
    inside = "".join(child if isinstance(child, Html) else html.escape(str(child)) for child in children)
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"' for key, value in attributes.items()
    )
    return Html(f"<{name}{told}>{inside}</{name}>")


def render(status: Status) -> str:
    """Return the whole page."""
    judged = readiness(status)
    tone, verdict = ("good", "ready") if judged.ready else ("bad", "not ready")
    own = status.coordinator
    about = f"{own.version}, term {status.term}, up {duration(own.uptime_s)}, since {own.started_at}"
    main = tag(
        "main",
        tag("header", tag("h1", "wavekeeper"), tag("span", verdict, class_=f"chip {tone}"), _dim(about)),
        *(_note("bad", reason) for reason in judged.reasons),
        *(_note("warn", text) for text in judged.degraded),
        *map(_card, status.deployments),
    )
    links = [
        tag("a", path, href=path.removeprefix("/"))
        for path in ("/v1/status", "/v1/deployments", "/metrics", "/readyz?verbose")
    ]
    places = tag("div", f"control {own.control}, feed {own.feed}, configuration {own.config_hash}")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        # Else the browser asks for /favicon.ico with each visit.
        '<link rel="icon" href="data:,">'
        '<noscript><meta http-equiv="refresh" content="5"></noscript>'
        f"{tag('title', f'wavekeeper: {verdict}')}<style>{_STYLE}</style></head><body>"
        f"{tag('div', 'The coordinator does not answer; this is its last word.', id='stale', role='status')}"
        f"{main}{tag('footer', *links, places)}<script>{_SCRIPT}</script></body></html>\n"
    )


def _card(d: DeploymentView) -> Html:
    life = "lockstep" if d.lockstep else "independent"
    return tag(
        "section",
        tag(
            "h2",
            d.name,
            tag("span", f"{d.phase} for {duration(d.phase_s)}", class_=f"chip {_TONES[d.phase]}"),
            _dim(f"{d.kind}, {life}"),
        ),
        *([_note("warn", d.waits_for)] if d.waits_for else []),
        *([_note("bad", d.fault)] if d.fault and d.fault not in d.waits_for else []),
        *(
            _note("warn", f"a start waits for {duration(start.waiting_s)}, asked for by {start.asked_by}")
            for start in d.waiting_starts
        ),
        tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in _facts(d))),
        *([_dim(f"exchange: {exchange_words(d)}")] if d.lockstep else []),
        _dim(f"coordination cost: {coordination_cost(d)}"),
        _grid(d.ranks),
        _details(d),
        id=f"deployment-{d.name}",
    )


def _facts(d: DeploymentView) -> Iterable[tuple[str, object]]:
    yield "ranks up", f"{d.ranks_up} of {d.dp_size}"
    yield "running", d.load.running
    yield "waiting", d.load.waiting
    yield "KV cache max", percent(d.load.kv_cache_usage)
    if d.lockstep:
        yield "wave", d.wave
        yield "epoch", d.epoch
        yield "waves run", d.waves
        yield "empty waves", d.empty_waves
        yield "dummy steps", d.dummy_steps
    yield "lost ranks", d.lost_ranks


def _grid(ranks: list[RankView]) -> Html:
    small = len(ranks) >= SMALL_TILES_FROM
    return tag("ol", *(_tile(rank, small) for rank in ranks), class_="small" if small else "tiles")


def _tile(rank: RankView, small: bool) -> Html:
    if not rank.up or rank.mode is None:
        words = [] if small else [tag("span", "not there")]
        return tag("li", tag("b", rank.rank), *words, class_="bad gone", title=f"rank {rank.rank} is not there")
    load = rank.load
    title = (
        f"rank {rank.rank}: {rank.mode}, {_doing(rank)}, wave {rank.wave} step {rank.step}, {load.running} running, "
        f"{load.waiting} waiting, KV cache {percent(load.kv_cache_usage)}, heard {duration(rank.heard_s)} ago"
    )
    words = [] if small else [tag("span", rank.mode), tag("span", f"{load.running} + {load.waiting} req")]
    bar = tag(
        "svg",
        tag("rect", width=round(load.kv_cache_usage * 100), height=4),
        viewBox="0 0 100 4",
        preserveAspectRatio="none",
        aria_hidden="true",
    )
    return tag("li", tag("b", rank.rank), *words, bar, class_=_TONES[rank.mode], title=title)


def _details(d: DeploymentView) -> Html:
    rows = [_row(rank, d.lockstep) for rank in d.ranks[:TABLE_RANKS_MAX]]
    more = f" (the first {TABLE_RANKS_MAX}; all are in /v1/deployments/{d.name})" if len(d.ranks) > len(rows) else ""
    lockstep = ["wave", "step", "last"] if d.lockstep else []
    numbers = {"rank", "wave", "step", "last", "running", "waiting", "KV", "load age", "heard"}
    names = [
        "rank",
        "mode",
        "activity",
        *lockstep,
        "running",
        "waiting",
        "KV",
        "load age",
        "heard",
        "host",
        "serves at",
        "incarnation",
        "attributes",
    ]
    head = tag("tr", *(tag("th", name, class_="n" if name in numbers else "t") for name in names))
    table = tag("table", tag("thead", head), tag("tbody", *rows))
    return tag("details", tag("summary", f"every rank{more}"), tag("div", table, class_="scroll"))


def _row(rank: RankView, lockstep: bool) -> Html:
    def numbers(*values: object) -> list[Html]:
        return [tag("td", value, class_="n") for value in values]

    if not rank.up or rank.mode is None:
        return tag("tr", *numbers(rank.rank), tag("td", "not there", colspan=14 if lockstep else 11, class_="bad"))
    load = rank.load
    return tag(
        "tr",
        *numbers(rank.rank),
        tag("td", rank.mode, class_=_TONES[rank.mode]),
        tag("td", _doing(rank)),
        *(numbers(rank.wave, rank.step, last_share(rank)) if lockstep else []),
        *numbers(load.running, load.waiting, percent(load.kv_cache_usage)),
        *numbers("never" if rank.load_age_s is None else duration(rank.load_age_s), duration(rank.heard_s)),
        tag("td", rank.host),
        tag("td", rank.serve),
        tag("td", rank.incarnation),
        tag("td", ", ".join(f"{key}={value}" for key, value in rank.attributes.items())),
    )


def _doing(rank: RankView) -> str:
    return f"{rank.activity or Activity.IDLE} for {duration(rank.activity_s)}"


def _note(tone: str, text: str) -> Html:
    return tag("p", tag("span", text), class_=f"note {tone}")


def _dim(text: str) -> Html:
    return tag("div", text, class_="dim")
