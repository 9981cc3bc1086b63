-- What tells keys apart without their secrets: how the secret starts, until when it is good, when it was last used.

ALTER TABLE keys ADD COLUMN secret_start TEXT NOT NULL DEFAULT '';
ALTER TABLE keys ADD COLUMN expires_at INTEGER;
ALTER TABLE keys ADD COLUMN used_at INTEGER;

PRAGMA user_version = 8;
