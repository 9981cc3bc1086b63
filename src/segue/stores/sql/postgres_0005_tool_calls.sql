-- How many calls of a turn our own tools answered.

ALTER TABLE usage ADD COLUMN tool_calls bigint NOT NULL DEFAULT 0;
