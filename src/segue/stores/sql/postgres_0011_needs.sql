-- What a process must know to use this database: its scripts up to a number, and a format of rows. Versions before 0.3.0 do
-- not look here; they refuse the database for its number.
CREATE TABLE needs (schema bigint NOT NULL, row_format bigint NOT NULL);

INSERT INTO needs (schema, row_format) VALUES (11, 1);

-- What a living process knows; nothing where it is older than this.
ALTER TABLE workers ADD COLUMN schema bigint;

ALTER TABLE workers ADD COLUMN row_format bigint;

ALTER TABLE workers ADD COLUMN version text;
