-- One row a token: which trajectory, where in it, the token, every per-token column under its own name (null where
-- the row has none), and the policy version that produced it: that of its segment; of the whole row when there are
-- no segments and one version is known; else null. loss_mask and action_mask are the ones that load: not given,
-- loss_mask is 1 after the prompt and action_mask is loss_mask. log_ratio = log_probs - behavior_log_probs.
create or replace temp view tokens as
with segmented as (
    select *,
        [{'start': s.start, 'end': s."end", 'version_id': s.version_id} for s in version_segments] as known
    from stored
),
gapped as (
    select *,
        -- Tool and prompt tokens belong to no segment: the ranges between the segments.
        [{'start': g[1], 'end': g[2], 'version_id': null::bigint}
         for g in list_zip(list_concat([0::int], [k."end" for k in known]),
                           list_concat([k.start for k in known], [length::int]))
         if g[1] < g[2]] as gaps
    from segmented
),
pieces as (
    select *, unnest(
        case when known is null or len(known) = 0 then
            [{'start': 0::int, 'end': length::int,
              'version_id': case when oldest_version_id = newest_version_id then oldest_version_id end}]
        else list_concat(known, gaps) end
    ) as piece
    from gapped
),
unnested as (
    select id, group_id, prompt_length, piece.version_id as version_id,
        unnest(range(piece.start, piece."end")) as position,
        $token_columns
    from pieces
),
masked as (
    select * replace (
        coalesce(loss_mask, (position >= prompt_length)::tinyint) as loss_mask,
        coalesce(action_mask, loss_mask, (position >= prompt_length)::tinyint) as action_mask
    )
    from unnested
)
select id, group_id, position, position < prompt_length as in_prompt, version_id,
    $current_version - version_id as version_gap,
    * exclude (id, group_id, position, prompt_length, version_id),
    log_probs::double - behavior_log_probs::double as log_ratio
from masked;
