-- Versions of skills; their zips are where the files of clients are, under the same ids. A version without an id was
-- deleted: its number is not given again.
CREATE TABLE skill_versions (
    id text UNIQUE,
    owner text NOT NULL,
    skill_id text NOT NULL,
    name text NOT NULL,
    description text NOT NULL,
    bytes bigint NOT NULL,
    created_at bigint NOT NULL,
    version bigint NOT NULL,
    skill_created_at bigint NOT NULL,
    rank bigint NOT NULL,
    PRIMARY KEY (skill_id, version)
);

CREATE INDEX skill_versions_of_owner ON skill_versions (owner);
