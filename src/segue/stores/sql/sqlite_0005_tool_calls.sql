-- How many calls of a turn our own tools answered.

ALTER TABLE usage ADD COLUMN tool_calls INTEGER NOT NULL DEFAULT 0;

PRAGMA user_version = 5;
