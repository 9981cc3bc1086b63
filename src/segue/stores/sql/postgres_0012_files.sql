-- Files that clients have uploaded; their bytes are in a folder or a bucket, under the same ids.
CREATE TABLE files (
    id text PRIMARY KEY,
    owner text NOT NULL,
    filename text NOT NULL,
    purpose text NOT NULL,
    bytes bigint NOT NULL,
    created_at bigint NOT NULL,
    expires_at bigint
);

CREATE INDEX files_of_owner ON files (owner, created_at);

CREATE INDEX files_expiring ON files (expires_at) WHERE expires_at IS NOT NULL;
