-- The turn that speaks in a conversation, and the process that runs it: one at a time, whoever is asked.

ALTER TABLE conversations ADD COLUMN speaker TEXT;

ALTER TABLE conversations ADD COLUMN worker TEXT;

CREATE INDEX conversations_by_worker ON conversations (worker) WHERE worker IS NOT NULL;

PRAGMA user_version = 6;
