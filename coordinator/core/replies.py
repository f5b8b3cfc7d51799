"""What is said to somebody whose message cannot be followed, in one place for all who say it."""

from collections.abc import Iterable

from ...proto.messages import FromRank, Mismatch, RefusalReason, Refused, RegisterAgain, cut


def refused(
    message: FromRank, term: int, reason: RefusalReason, detail: str, mismatches: Iterable[Mismatch] = ()
) -> Refused:
    """This life of the rank is not registered; a duplicate may ask again, since the other one may die."""
    return Refused(
        deployment=message.deployment,
        rank=message.rank,
        incarnation=message.incarnation,
        term=term,
        reason=reason,
        detail=cut(detail),
        mismatches=list(mismatches),
        retry=reason is RefusalReason.DUPLICATE_RANK,
    )


def register_again(message: FromRank, term: int) -> RegisterAgain:
    """Nobody of that name is known in this term."""
    return RegisterAgain(deployment=message.deployment, rank=message.rank, incarnation=message.incarnation, term=term)


def no_such_deployment(name: str, known: Iterable[str]) -> str:
    """`there is no deployment 'x'; there is y, z`."""
    return f"there is no deployment {name!r}; there is {', '.join(known)}"
