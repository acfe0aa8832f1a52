-- One row a group of siblings. `rows` counts all of them; size and the rewards count completed ones. Rewards that are
-- not finite are counted in not_finite and left out. std_reward divides by n - 1. A group is zero_variance when its
-- rewards differ by at most 1e-9 of the largest: the standard deviation of equal rewards is not 0 in every engine.
-- passed counts rewards above 0; pass_at_k(size, passed, k) is the unbiased estimate. The gap is of the worst member.
create or replace temp view groups as
with members as (
    select *, status = 'completed' as done, status = 'completed' and isfinite(reward) as counts
    from stored
    where group_id is not null
)
select group_id,
    count(*) as rows,
    count(*) filter (done) as size,
    max(group_size) as group_size,
    avg(reward) filter (counts) as mean_reward,
    stddev_samp(reward) filter (counts) as std_reward,
    min(reward) filter (counts) as min_reward,
    max(reward) filter (counts) as max_reward,
    count(*) filter (done and not isfinite(reward)) as not_finite,
    count(*) filter (counts) > 1 and max(reward) filter (counts) - min(reward) filter (counts)
        <= 1e-9 * max(abs(reward)) filter (counts) as zero_variance,
    count(*) filter (counts and reward > 0) as passed,
    avg(length) filter (done) as mean_length,
    min(oldest_version_id) as oldest_version_id,
    max(newest_version_id) as newest_version_id,
    $current_version - min(oldest_version_id) as version_gap
from members
group by group_id;
