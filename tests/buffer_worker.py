"""What the process of the kill test does; it imports little, since it is started anew for each kill."""

import json
import random
import sys
from pathlib import Path

from trajstore import PartialTrajectory, PolicyVersion, TrajectoryBuffer, TrajectoryStatus, TrajectoryStore

ENDS = [TrajectoryStatus.ABORTED, TrajectoryStatus.COMPLETED]


def work(path: str, progress: str, number: str) -> None:
    """Adds partials and continues some, and notes after each flush what is durable; until it is killed."""
    buffer = TrajectoryBuffer(store=TrajectoryStore.open(path))
    for step in range(10**6):
        made = [
            PartialTrajectory(
                id=f"{number}/{step}/{i}",
                prompt_tokens=[1, 2],
                response_tokens=[3] * i,
                version=PolicyVersion(step),
                status=TrajectoryStatus.ABORTED,
            )
            for i in range(3)
        ]
        buffer.add_batch(made)
        there = buffer.get_partials_for_prompts(max_continuations=99)[:2]
        for old in there:
            buffer.add(old.continue_with([1], [-1.0], step, status=random.choice(ENDS)))
        buffer.flush()
        with Path(progress).open("a") as out:
            note = {"partials": [t.id for t in made], "continued": [t.id for t in there]}
            out.write(json.dumps(note) + "\n")


if __name__ == "__main__":
    work(*sys.argv[1:])
