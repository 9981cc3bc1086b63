-- What keys and owners have used of a day and a month, from the very rows of usage. A version that does not know keys here
-- leaves them out; the trigger counts its rows as well.

ALTER TABLE usage ADD COLUMN key_id TEXT NOT NULL DEFAULT '';

-- Tokens of a subject, `key …` or `owner …`, on a day (of UTC, from 1970).
CREATE TABLE spending (
    subject TEXT NOT NULL,
    day INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    PRIMARY KEY (subject, day)
) WITHOUT ROWID;

CREATE INDEX spending_by_day ON spending (day);

CREATE TRIGGER spending_after_usage AFTER INSERT ON usage BEGIN
    INSERT INTO spending (subject, day, tokens)
    VALUES ('owner ' || new.owner, new.ended_at / 86400, new.input_tokens + new.output_tokens)
    ON CONFLICT (subject, day) DO UPDATE SET tokens = tokens + excluded.tokens;
    INSERT INTO spending (subject, day, tokens)
    SELECT 'key ' || new.key_id, new.ended_at / 86400, new.input_tokens + new.output_tokens
    WHERE new.key_id <> ''
    ON CONFLICT (subject, day) DO UPDATE SET tokens = tokens + excluded.tokens;
END;

-- The month that runs began before this script.
INSERT INTO spending (subject, day, tokens)
SELECT 'owner ' || owner, ended_at / 86400, sum(input_tokens + output_tokens) FROM usage
WHERE ended_at >= CAST(strftime('%s', 'now', 'start of month') AS INTEGER)
GROUP BY 1, 2;

PRAGMA user_version = 13;
