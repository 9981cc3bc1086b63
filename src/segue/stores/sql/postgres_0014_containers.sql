-- What the containers of an owner have used, in rows of their own: seconds that they lived, CPU seconds, bytes sent.

ALTER TABLE usage ADD COLUMN container_s float8 NOT NULL DEFAULT 0;
ALTER TABLE usage ADD COLUMN cpu_s float8 NOT NULL DEFAULT 0;
ALTER TABLE usage ADD COLUMN egress_bytes bigint NOT NULL DEFAULT 0;
