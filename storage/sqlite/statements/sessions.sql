-- name: find_session
SELECT session_key, revision, commit_id, commit_revision, fork_id, epoch, renewals, holder
FROM session
WHERE tenant_id = :tenant_id AND user_id = :user_id AND session_id = :session_id;

-- name: add_session
INSERT INTO session (tenant_id, user_id, session_id, epoch)
VALUES (:tenant_id, :user_id, :session_id, :epoch);

-- name: read_epoch_floor (across tenants: a number of the store, nobody's own)
SELECT value
FROM meta
WHERE name = 'epoch_floor';

-- name: set_epoch_floor (across tenants: as above)
UPDATE meta
SET value = :epoch
WHERE name = 'epoch_floor';

-- name: delete_session
DELETE FROM session
WHERE session_key = :session_key;

-- name: set_lease
UPDATE session
SET epoch = :epoch, renewals = 0, holder_id = :holder_id, holder = :holder
WHERE session_key = :session_key;

-- name: renew_lease
UPDATE session
SET renewals = renewals + 1
WHERE tenant_id = :tenant_id AND user_id = :user_id AND session_id = :session_id
    AND epoch = :epoch AND holder_id IS NOT NULL;

-- name: end_lease
UPDATE session
SET holder_id = NULL, holder = NULL
WHERE session_key = :session_key;

-- name: held_by (across tenants: a dead process is fenced whoever its sessions belong to)
SELECT tenant_id, user_id, session_id
FROM session
WHERE holder_id = :holder_id
ORDER BY session_key;

-- name: end_leases_of (across tenants: as above)
UPDATE session
SET holder_id = NULL, holder = NULL
WHERE holder_id = :holder_id;

-- name: add_fenced (across tenants: as above)
INSERT OR IGNORE INTO fenced_holder (holder_id)
VALUES (:holder_id);

-- name: is_fenced (across tenants: as above)
SELECT 1
FROM fenced_holder
WHERE holder_id = :holder_id;

-- name: list_sessions (across tenants: for operators)
SELECT
    tenant_id, user_id, session_id, revision, replayable,
    (SELECT size FROM conversation WHERE session_key = session.session_key AND execution_id = ''),
    (SELECT count(*) FROM run WHERE run.session_key = session.session_key),
    (
        SELECT count(*) FROM run INDEXED BY run_open
        WHERE run.session_key = session.session_key AND outcome IS NULL
    ),
    holder_id
FROM session
WHERE (tenant_id, user_id, session_id) > (:after_tenant, :after_user, :after_session)
ORDER BY tenant_id, user_id, session_id
LIMIT :limit;

-- name: list_sessions_of_tenant (across users: of one tenant)
SELECT
    tenant_id, user_id, session_id, revision, replayable,
    (SELECT size FROM conversation WHERE session_key = session.session_key AND execution_id = ''),
    (SELECT count(*) FROM run WHERE run.session_key = session.session_key),
    (
        SELECT count(*) FROM run INDEXED BY run_open
        WHERE run.session_key = session.session_key AND outcome IS NULL
    ),
    holder_id
FROM session
WHERE tenant_id = :tenant_id AND (user_id, session_id) > (:after_user, :after_session)
ORDER BY user_id, session_id
LIMIT :limit;

-- name: list_sessions_of_user (across sessions: of one user)
SELECT
    tenant_id, user_id, session_id, revision, replayable,
    (SELECT size FROM conversation WHERE session_key = session.session_key AND execution_id = ''),
    (SELECT count(*) FROM run WHERE run.session_key = session.session_key),
    (
        SELECT count(*) FROM run INDEXED BY run_open
        WHERE run.session_key = session.session_key AND outcome IS NULL
    ),
    holder_id
FROM session
WHERE tenant_id = :tenant_id AND user_id = :user_id AND session_id > :after_session
ORDER BY session_id
LIMIT :limit;
