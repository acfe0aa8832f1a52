-- One row a trajectory, with all its columns; version_gap is null where the version, or the current one, is not known.
create or replace temp view trajectories as
select *, $current_version - oldest_version_id as version_gap
from stored;
