-- What the containers of an owner have used, in rows of their own: seconds that they lived, CPU seconds, bytes sent.

ALTER TABLE usage ADD COLUMN container_s REAL NOT NULL DEFAULT 0;
ALTER TABLE usage ADD COLUMN cpu_s REAL NOT NULL DEFAULT 0;
ALTER TABLE usage ADD COLUMN egress_bytes INTEGER NOT NULL DEFAULT 0;

PRAGMA user_version = 12;
