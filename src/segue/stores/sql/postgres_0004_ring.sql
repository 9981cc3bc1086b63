-- The ring of keys that seal what clients keep for us, so that all machines share it. The highest place is the newest.
CREATE TABLE ring (
    place integer PRIMARY KEY,
    name bytea NOT NULL,
    secret bytea NOT NULL
);
