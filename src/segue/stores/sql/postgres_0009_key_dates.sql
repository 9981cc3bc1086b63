-- What tells keys apart without their secrets: how the secret starts, until when it is good, when it was last used.

ALTER TABLE keys ADD COLUMN secret_start text NOT NULL DEFAULT '';
ALTER TABLE keys ADD COLUMN expires_at bigint;
ALTER TABLE keys ADD COLUMN used_at bigint;
