-- Of two versions: staleness of `version` when the trainer is at `current`. Signed, so that it never wraps.
create or replace macro version_gap(current_version, version) as current_version::bigint - version::bigint;

-- Aggregate of lengths: padding / padded size when these rows are one batch, padded to its longest row.
create or replace macro padding_ratio(lengths) as
    1 - sum(lengths)::double / nullif(count(lengths) * max(lengths)::double, 0);

-- Of a token: p / q = exp(log p - log q), with p the trainer's and q the behaviour policy.
create or replace macro importance_ratio(log_prob, behavior_log_prob) as
    exp(log_prob::double - behavior_log_prob::double);

-- The same, at most `cap` (truncated importance sampling). NaN stays NaN: least() would make it the cap.
create or replace macro truncated_importance_ratio(log_prob, behavior_log_prob, cap) as
    case when isnan(exp(log_prob::double - behavior_log_prob::double)) then 'nan'::double
         when log_prob is null or behavior_log_prob is null then null
         else least(exp(log_prob::double - behavior_log_prob::double), cap::double) end;

-- Of a token: estimators of KL(q || p), tokens sampled from q (Schulman, "Approximating KL divergence", 2020).
-- k1 = -log r is unbiased and may be negative; k2 = (log r)^2 / 2 is biased; k3 = r - 1 - log r is unbiased, never negative.
create or replace macro kl_k1(log_prob, behavior_log_prob) as
    behavior_log_prob::double - log_prob::double;
create or replace macro kl_k2(log_prob, behavior_log_prob) as
    0.5 * pow(log_prob::double - behavior_log_prob::double, 2);
create or replace macro kl_k3(log_prob, behavior_log_prob) as
    exp(log_prob::double - behavior_log_prob::double) - 1 - (log_prob::double - behavior_log_prob::double);

-- Aggregate of weights: effective sample size, (sum w)^2 / sum w^2 (Kish). Between 1 and the number of weights.
create or replace macro ess(weights) as pow(sum(weights::double), 2) / nullif(sum(pow(weights::double, 2)), 0);

-- Of a group: chance that one of k samples passes, from n samples of which c passed; unbiased:
-- 1 - C(n - c, k) / C(n, k) (Chen et al., "Evaluating large language models trained on code", 2021). Null if k > n.
create or replace macro pass_at_k(n, c, k) as
    case when k < 1 or k > n then null
         when c = 0 then 0.0
         when n - c < k then 1.0
         else 1 - exp((lgamma(n - c + 1) - lgamma(n - c - k + 1)) - (lgamma(n + 1) - lgamma(n - k + 1))) end;
