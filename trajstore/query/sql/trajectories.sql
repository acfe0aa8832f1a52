-- One row a trajectory, with all its columns. version_gap (current version - oldest version) is null where either
-- is not known, and negative where the row is newer than the trainer.
create or replace temp view trajectories as
select *, $current_version - oldest_version_id as version_gap
from stored;
