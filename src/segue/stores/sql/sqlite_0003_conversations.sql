-- Conversations: rows of items by name. `version` counts writes, so that two who write at once notice.
CREATE TABLE conversations (
    owner TEXT NOT NULL,
    id TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    metadata BLOB NOT NULL,
    tip_id TEXT,
    tip_items INTEGER NOT NULL,
    count INTEGER NOT NULL,
    version INTEGER NOT NULL,
    PRIMARY KEY (owner, id)
) WITHOUT ROWID;

CREATE TABLE shelved (
    owner TEXT NOT NULL,
    conversation_id TEXT NOT NULL,
    position INTEGER NOT NULL,
    item_id TEXT NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (owner, conversation_id, position),
    FOREIGN KEY (owner, conversation_id) REFERENCES conversations (owner, id) ON DELETE CASCADE
);

CREATE INDEX shelved_by_item ON shelved (owner, conversation_id, item_id);

PRAGMA user_version = 3;
