-- One row a batch of a batching plan: rows, tokens, the longest row, tokens after padding, padding ratio. Without
-- plans of one's own there are "row order" and "bucketed", of 256 rows a batch.
create or replace temp view batches as
select * from batch_padding;
