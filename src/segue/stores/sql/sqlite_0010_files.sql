-- Files that clients have uploaded; their bytes are in a folder or a bucket, under the same ids.
CREATE TABLE files (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    filename TEXT NOT NULL,
    purpose TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER
);

CREATE INDEX files_of_owner ON files (owner, created_at);

CREATE INDEX files_expiring ON files (expires_at) WHERE expires_at IS NOT NULL;

PRAGMA user_version = 10;
