-- One row a version segment: its trajectory, its number there (from 0), the half-open range of tokens, and the policy
-- version that produced them. Trajectories without segments have no rows here.
create or replace temp view segments as
with numbered as (
    select id, group_id, unnest(range(len(version_segments))) as segment, unnest(version_segments) as s
    from stored
)
select id, group_id, segment, s.start as start, s."end" as "end", s."end" - s.start as tokens,
    s.version_id as version_id, s.step as step, s.timestamp as timestamp,
    $current_version - s.version_id as version_gap
from numbered;
