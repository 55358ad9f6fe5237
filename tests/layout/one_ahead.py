"""Planted mistake: posts every receive one computation early, whatever its sender does meanwhile."""

from dataclasses import replace

from pentatron.layout.actions import RECEIVES, Action, Kind, Schedule
from pentatron.layout.check import COMPUTATIONS


def one_ahead(schedule: Schedule) -> Schedule:
    return replace(schedule, actions=tuple(map(_reposted, schedule.actions)))


def _reposted(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    receives = {_consumer(a): a for a in actions if a.kind in RECEIVES}
    others = [a for a in actions if a.kind not in RECEIVES]
    computed = [i for i, a in enumerate(others) if a.kind in COMPUTATIONS]
    before: dict[int, list[Action]] = {}
    for number, place in enumerate(computed):
        action = others[place]
        kind = Kind.BACKWARD if action.kind is Kind.INPUT else action.kind
        if receive := receives.get((kind, action.stage, action.micro_batch)):
            before.setdefault(computed[max(0, number - 1)], []).append(receive)
    return tuple(x for i, a in enumerate(others) for x in (*before.get(i, ()), a))


def _consumer(receive: Action) -> tuple[Kind, int, int]:
    if receive.kind is Kind.RECEIVE_ACTIVATION:
        return Kind.FORWARD, receive.stage + 1, receive.micro_batch
    return Kind.BACKWARD, receive.stage - 1, receive.micro_batch
