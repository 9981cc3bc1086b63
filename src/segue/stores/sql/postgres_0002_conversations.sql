-- Conversations: rows of items by name. `version` counts writes, so that two who write at once notice.
CREATE TABLE conversations (
    owner text NOT NULL,
    id text NOT NULL,
    created_at bigint NOT NULL,
    metadata bytea NOT NULL,
    tip_id text,
    tip_items bigint NOT NULL,
    count bigint NOT NULL,
    version bigint NOT NULL,
    PRIMARY KEY (owner, id)
);

CREATE TABLE shelved (
    owner text NOT NULL,
    conversation_id text NOT NULL,
    position bigint NOT NULL,
    item_id text NOT NULL,
    body bytea NOT NULL,
    PRIMARY KEY (owner, conversation_id, position),
    FOREIGN KEY (owner, conversation_id) REFERENCES conversations (owner, id) ON DELETE CASCADE
);

CREATE INDEX shelved_by_item ON shelved (owner, conversation_id, item_id);
