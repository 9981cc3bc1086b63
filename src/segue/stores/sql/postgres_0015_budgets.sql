-- What keys and owners have used of a day and a month, from the very rows of usage. A version that does not know keys here
-- leaves them out; the trigger counts its rows as well.

ALTER TABLE usage ADD COLUMN key_id text NOT NULL DEFAULT '';

-- Tokens of a subject, `key …` or `owner …`, on a day (of UTC, from 1970). Each connection has rows of its own, so that
-- no two turns wait for each other.
CREATE TABLE spending (
    subject text NOT NULL,
    day bigint NOT NULL,
    connection bigint NOT NULL,
    tokens bigint NOT NULL,
    PRIMARY KEY (subject, day, connection)
);

CREATE INDEX spending_by_day ON spending (day);

CREATE FUNCTION add_spending(usage, bigint) RETURNS void LANGUAGE sql AS $$
    INSERT INTO spending (subject, day, connection, tokens)
    SELECT
        subject, $1.ended_at / 86400, pg_backend_pid(),
        $2 * ($1.input_tokens + $1.output_tokens)
    FROM (VALUES ('owner ' || $1.owner, true), ('key ' || $1.key_id, $1.key_id <> ''))
        AS counted (subject, is_known)
    WHERE is_known
    ON CONFLICT (subject, day, connection) DO UPDATE SET tokens = spending.tokens + excluded.tokens
$$;

CREATE FUNCTION count_spending() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'UPDATE' THEN
        PERFORM add_spending(old, -1);
    END IF;
    PERFORM add_spending(new, 1);
    RETURN NULL;
END
$$;

CREATE TRIGGER spending_after_usage AFTER INSERT OR UPDATE ON usage
FOR EACH ROW EXECUTE FUNCTION count_spending();

-- The month that runs began before this script.
INSERT INTO spending (subject, day, connection, tokens)
SELECT 'owner ' || owner, ended_at / 86400, 0, sum(input_tokens + output_tokens) FROM usage
WHERE ended_at >= extract(epoch FROM date_trunc('month', now() AT TIME ZONE 'UTC'))::bigint
GROUP BY 1, 2;
