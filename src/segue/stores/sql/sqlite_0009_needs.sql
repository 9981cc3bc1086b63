-- What a process must know to use this file: its scripts up to a number, and a format of rows. Versions before 0.3.0 do not
-- look here; they refuse the file for its number.
CREATE TABLE needs (schema INTEGER NOT NULL, row_format INTEGER NOT NULL);

INSERT INTO needs (schema, row_format) VALUES (9, 1);

PRAGMA user_version = 9;
