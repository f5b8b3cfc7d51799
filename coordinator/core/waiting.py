"""Who waits for whom, in words: one sentence for a lockstep deployment, from its state alone.

A rank at full load and a rank that only waits look the same from outside; what each engine's thread says of itself
tells them apart. A rank that waits inside the exchange is not the one that everybody waits for.
"""

from ...proto.messages import Activity, Mode
from .members import MemberRecord, Members


def stalled(members: Members, since_ms: int, stall_after_ms: int, now_ms: int) -> list[MemberRecord]:
    """Ranks that keep a running wave waiting: silent, or outside the exchange, for `stall_after_ms` and not
    announced as busy.
    """
    late = []
    for record in members:
        if record.at.mode is not Mode.RUNNING:
            continue  # not, or no more, in the wave
        # Before the wave began nobody was waited for.
        began_ms = record.heard_ms if _is_silent(record, stall_after_ms, now_ms) else record.activity_since_ms
        waits = record.activity is Activity.EXCHANGING and not _is_silent(record, stall_after_ms, now_ms)
        if not waits and now_ms - max(began_ms, since_ms) >= stall_after_ms and now_ms >= record.busy_until_ms:
            late.append(record)
    return late


def stall_text(wave: int, late: list[MemberRecord], stall_after_ms: int, now_ms: int) -> str:
    """`wave 7 waits for rank 2: stepping since 5.2 s at step 41`."""
    told = []
    for record in late:
        if _is_silent(record, stall_after_ms, now_ms):
            told.append(f"rank {record.rank}: silent since {_seconds(now_ms - record.heard_ms)} s")
        else:
            age_s = _seconds(now_ms - record.activity_since_ms)
            told.append(f"rank {record.rank}: {record.activity} since {age_s} s at step {record.at.step}")
    return f"wave {wave} waits for {'; '.join(told)}"


def names(ranks: list[int]) -> str:
    """Ranks in words: `3`, or `1, 2 and 3`."""
    texts = [str(rank) for rank in ranks]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}" if texts else "nobody"


def _is_silent(record: MemberRecord, stall_after_ms: int, now_ms: int) -> bool:
    return now_ms - record.heard_ms >= stall_after_ms


def _seconds(milliseconds: int) -> str:
    return f"{milliseconds / 1000:.1f}"
