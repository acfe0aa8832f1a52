"""A columnar store for the trajectories of language-model RL: Arrow in, Parquet at rest, torch batches out.

Heavy parts are explicit submodules: `trajstore.query`, `trajstore.loader`. Nothing here imports torch.
"""

from trajstore.batch import TrajectoryBatch
from trajstore.buffer import TrajectoryBuffer
from trajstore.errors import (
    ConflictError,
    CorruptFileError,
    FormatVersionError,
    ImportFormatError,
    InputError,
    LengthMismatchError,
    QueryError,
    SchemaError,
    StorageError,
    StoreExistsError,
    StoreNotFoundError,
    TrajstoreError,
    UncertainCommitError,
    ValidationError,
)
from trajstore.store import Commit, Scan, TrajectoryStore
from trajstore.trajectory import (
    PartialTrajectory,
    PolicyVersion,
    Trajectory,
    TrajectoryStatus,
    VersionSegment,
)

__version__ = "0.1.0"

__all__ = [
    "Commit",
    "ConflictError",
    "CorruptFileError",
    "FormatVersionError",
    "ImportFormatError",
    "InputError",
    "LengthMismatchError",
    "PartialTrajectory",
    "PolicyVersion",
    "QueryError",
    "Scan",
    "SchemaError",
    "StorageError",
    "StoreExistsError",
    "StoreNotFoundError",
    "Trajectory",
    "TrajectoryBatch",
    "TrajectoryBuffer",
    "TrajectoryStatus",
    "TrajectoryStore",
    "TrajstoreError",
    "UncertainCommitError",
    "ValidationError",
    "VersionSegment",
    "__version__",
]
