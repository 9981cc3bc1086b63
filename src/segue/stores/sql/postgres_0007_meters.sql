-- What is left of each key's minute, by this server's clock; and which process holds how many of its places. Nothing of it
-- must survive, so nobody waits for a disk: after a crash the tables are empty, and processes tell again.

CREATE UNLOGGED TABLE meters (
    key_id text PRIMARY KEY,
    requests double precision NOT NULL,
    tokens double precision NOT NULL,
    filled_at double precision NOT NULL
);

CREATE UNLOGGED TABLE places (
    key_id text NOT NULL,
    worker text NOT NULL,
    connections bigint NOT NULL,
    lanes bigint NOT NULL,
    PRIMARY KEY (key_id, worker)
);

CREATE INDEX places_by_worker ON places (worker);
