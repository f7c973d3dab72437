/* Batches of mutations, the loop of a writer's thread, and the batches that have ended. See native.h.

   S1  A mutation's checks come before its writes, and a refused mutation writes nothing.
   S2, S5  As in lmdb_engine.py.
   S4  A batch for which there may not be room goes back to Python before it begins.
   T13 The floor is compared when a batch is written, not when it is encoded.
   F1  The epoch is compared in the batch's own write transaction. */

#include "native.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

/* ------------------------------------------------------------ batches (`check_and_write` in row.py) */

enum { FLOOR, REFUSE, ABSENT_AT, PRESENT_AT, ABSENT, PRESENT, PUT, DELETE, END };

typedef struct {
    uint8_t kind;
    uint8_t group;
    uint16_t size;  /* of the key */
    uint32_t row, check;
    size_t key, last; /* where the keys are in the batch's bytes; FLOOR: the timestamp */
    PyObject *value;
} Op;

typedef struct Batch {
    struct Batch *next;
    PyObject *work;   /* what Python gets: of a batch, the tuple (tablet, entries) */
    Environment *env; /* NULL: other work, for Python only */
    Op *ops;
    char *bytes;
    int32_t (*verdicts)[2]; /* row, check; row -1: applied */
    size_t n_ops, room_ops, n_bytes, room_bytes, n_mutations;
    Py_ssize_t need; /* bytes of the file that it may take */
    int rc;          /* of a commit that failed */
    size_t txn_id;
    double began, ended;
} Batch;

static double
now(void)
{ /* as time.perf_counter() */
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void
free_batch(Batch *batch)
{ /* with the GIL */
    for (size_t i = 0; i < batch->n_ops; i++)
        Py_XDECREF(batch->ops[i].value);
    Py_XDECREF(batch->work);
    Py_XDECREF((PyObject *)batch->env);
    free(batch->ops);
    free(batch->bytes);
    free(batch->verdicts);
    free(batch);
}

static Op *
new_op(Batch *batch, int kind)
{
    if (batch->n_ops == batch->room_ops) {
        size_t room = batch->room_ops ? 2 * batch->room_ops : 256;
        Op *ops = realloc(batch->ops, room * sizeof *ops);
        if (!ops)
            return NULL;
        batch->ops = ops;
        batch->room_ops = room;
    }
    Op *op = memset(&batch->ops[batch->n_ops++], 0, sizeof *op);
    op->kind = (uint8_t)kind;
    return op;
}

/* Put a key into the batch's bytes. Returns where, or -1. With `ts`, the key of a cell; `log`: of its entry in the log. */
static ptrdiff_t
add_key(Batch *batch, const char *prefix, size_t size, uint32_t column, uint64_t ts, int log)
{
    size_t at = batch->n_bytes;
    if (at + size + TAIL > batch->room_bytes) {
        size_t room = 2 * batch->room_bytes + size + 16384;
        char *bytes = realloc(batch->bytes, room);
        if (!bytes)
            return -1;
        batch->bytes = bytes;
        batch->room_bytes = room;
    }
    char *out = batch->bytes + at;
    if (log) {
        uint64_t t = __builtin_bswap64(ts);
        uint32_t c = __builtin_bswap32(column);
        memcpy(out, &t, 8);
        memcpy(out + 8, prefix, size);
        memcpy(out + 8 + size, &c, 4);
    }
    else {
        memcpy(out, prefix, size);
        put_tail(out + size, column, ts);
    }
    batch->n_bytes += size + TAIL;
    return (ptrdiff_t)at;
}

static int
encode_check(Environment *env, Batch *batch, PyObject *check, uint32_t row, uint32_t i, const char *prefix, size_t size,
             PyObject *empty)
{
    uint64_t kind, column, low, high;
    if (!IS_TUPLE_OF(check, 5) || as_number(PyTuple_GET_ITEM(check, 0), &kind) || kind > 1)
        return -1;
    PyObject *name = PyTuple_GET_ITEM(check, 1);
    int skip = PySet_GET_SIZE(empty) ? PySet_Contains(empty, name) : 0;
    Op *op;
    if (skip < 0)
        return -1;
    if (skip) {
        if (kind == 0)
            return 0;
        if (!(op = new_op(batch, REFUSE)))
            return -1;
        op->row = row;
        op->check = i;
        return 0;
    }
    int group = group_of(env, name);
    if (group < 0 || as_number(PyTuple_GET_ITEM(check, 2), &column) || column > UINT32_MAX ||
        as_number(PyTuple_GET_ITEM(check, 3), &low) || as_number(PyTuple_GET_ITEM(check, 4), &high))
        return -1;
    int at = low == high;
    ptrdiff_t key = add_key(batch, prefix, size, (uint32_t)column, high, 0);
    ptrdiff_t last = at ? 0 : add_key(batch, prefix, size, (uint32_t)column, low, 0);
    if (key < 0 || last < 0 || !(op = new_op(batch, kind ? (at ? PRESENT_AT : PRESENT) : at ? ABSENT_AT : ABSENT)))
        return -1;
    op->group = (uint8_t)group;
    op->size = (uint16_t)(size + TAIL);
    op->row = row;
    op->check = i;
    op->key = (size_t)key;
    op->last = (size_t)last;
    return 0;
}

static int
add_write(Batch *batch, int group, const char *prefix, size_t size, uint32_t column, uint64_t ts, int log,
          PyObject *value)
{
    ptrdiff_t key = add_key(batch, prefix, size, column, ts, log);
    Op *op = key < 0 ? NULL : new_op(batch, value == Py_None ? DELETE : PUT);
    if (!op)
        return -1;
    op->group = (uint8_t)group;
    op->size = (uint16_t)(size + TAIL);
    op->key = (size_t)key;
    if (value != Py_None) {
        Py_XINCREF(value); /* NULL: an empty value */
        op->value = value;
    }
    return 0;
}

static int
encode_write(Environment *env, Batch *batch, PyObject *written, const char *prefix, size_t size)
{
    uint64_t column, ts;
    if (!IS_TUPLE_OF(written, 4))
        return -1;
    PyObject *value = PyTuple_GET_ITEM(written, 3);
    int group = group_of(env, PyTuple_GET_ITEM(written, 0));
    if (group < 0 || as_number(PyTuple_GET_ITEM(written, 1), &column) || column > UINT32_MAX ||
        as_number(PyTuple_GET_ITEM(written, 2), &ts) || !(value == Py_None || PyBytes_Check(value)))
        return -1;
    if (env->log >= 0 && (group == env->write || group == env->log)) { /* E1 */
        if (!(column & 0xffff)) {
            if (value != Py_None && group == env->log)
                return -1; /* only a record puts an entry into the log: Python says so */
            if (add_write(batch, env->log, prefix, size, (uint32_t)column, ts, 1, value == Py_None ? Py_None : NULL))
                return -1;
        }
        if (group == env->log)
            return 0;
    }
    return add_write(batch, group, prefix, size, (uint32_t)column, ts, 0, value);
}

static int
encode_mutation(Environment *env, Batch *batch, PyObject *mutation, PyObject *empty)
{
    char prefix[KEY_MAX + 1];
    if (!IS_TUPLE_OF(mutation, 4))
        return -1;
    PyObject *rows = PyTuple_GET_ITEM(mutation, 1), *floor_ts = PyTuple_GET_ITEM(mutation, 2);
    if (!IS_SEQUENCE(rows) || SIZE(rows) > UINT16_MAX)
        return -1;
    if (floor_ts != Py_None) {
        uint64_t ts;
        Op *op;
        if (as_number(floor_ts, &ts) || !(op = new_op(batch, FLOOR)))
            return -1;
        op->key = ts;
    }
    for (int writing = 0; writing < 2; writing++) /* every check comes before any write (S1) */
        for (Py_ssize_t r = 0; r < SIZE(rows); r++) {
            PyObject *row = ITEM(rows, r);
            if (!IS_TUPLE_OF(row, 3) || !PyBytes_Check(PyTuple_GET_ITEM(row, 0)))
                return -1;
            PyObject *list = PyTuple_GET_ITEM(row, 1 + writing);
            if (!IS_SEQUENCE(list))
                return -1;
            Py_ssize_t n = SIZE(list);
            size_t size = n ? prefix_of(PyTuple_GET_ITEM(row, 0), prefix) : 0;
            if (n && !size)
                return -1;
            for (Py_ssize_t i = 0; i < n && i < SIZE(list); i++)
                if (writing ? encode_write(env, batch, ITEM(list, i), prefix, size)
                            : encode_check(env, batch, ITEM(list, i), (uint32_t)r, (uint32_t)i, prefix, size, empty))
                    return -1;
        }
    return new_op(batch, END) ? 0 : -1;
}

/* Encode mutations. `entries`: tuples whose first item is a mutation. Returns NULL if Python has to write them. */
static Batch *
encode(Environment *env, PyObject *entries, PyObject *empty, int bare)
{
    if (!env->env || !PyList_Check(entries) || !PyAnySet_Check(empty))
        return NULL;
    Batch *batch = calloc(1, sizeof *batch);
    if (!batch)
        return NULL;
    Py_INCREF((PyObject *)env);
    batch->env = env;
    Py_ssize_t n = PyList_GET_SIZE(entries);
    batch->n_mutations = (size_t)n;
    batch->verdicts = malloc(sizeof *batch->verdicts * (n ? (size_t)n : 1));
    int failed = !batch->verdicts;
    for (Py_ssize_t i = 0; i < n && !failed; i++) {
        PyObject *entry = PyList_GET_ITEM(entries, i);
        if (!bare && (!PyTuple_Check(entry) || !PyTuple_GET_SIZE(entry)))
            failed = 1;
        else
            failed = encode_mutation(env, batch, bare ? entry : PyTuple_GET_ITEM(entry, 0), empty);
    }
    if (!failed)
        return batch;
    PyErr_Clear();
    free_batch(batch);
    return NULL;
}

/* Check and write a batch in one write transaction. Without the GIL. Returns 0: it is done; 1: nothing was written, and
   Python has to write it; -1: the commit failed. */
static int
run(Batch *batch, uint64_t floor)
{
    Environment *env = batch->env;
    MDB_txn *txn;
    MDB_cursor *cursors[GROUPS_MAX] = {0};
    MDB_envinfo info;
    int rc, any = 0;
    if (mdb.env_info(env->env, &info) ||
        (Py_ssize_t)((info.last_pgno + 1) * env->page) + batch->need > __atomic_load_n(&env->limit, __ATOMIC_ACQUIRE))
        return 1; /* S4 */
    if (mdb.txn_begin(env->env, NULL, 0, &txn))
        return 1;
    if (env->fenced) { /* F1 */
        MDB_val name = {6, "\0epoch"}, found;
        rc = mdb.get(txn, env->main, &name, &found);
        if (rc || found.mv_size != sizeof env->epoch || memcmp(found.mv_data, env->epoch, sizeof env->epoch))
            goto back;
    }
    size_t i = 0;
    for (size_t m = 0; m < batch->n_mutations; m++, i++) {
        int32_t *verdict = batch->verdicts[m];
        int holds = 1;
        verdict[0] = verdict[1] = -1;
        for (; batch->ops[i].kind != END; i++) {
            Op *op = &batch->ops[i];
            if (!holds)
                continue;
            MDB_val key = {op->size, batch->bytes + op->key}, value;
            switch (op->kind) {
            case FLOOR:
                holds = op->key >= floor;
                if (!holds)
                    op->row = 0, op->check = (uint32_t)-1;
                break;
            case REFUSE:
                holds = 0;
                break;
            case ABSENT_AT:
            case PRESENT_AT:
                rc = mdb.get(txn, env->dbis[op->group], &key, &value);
                if (rc && rc != MDB_NOTFOUND)
                    goto back;
                holds = (rc == 0) == (op->kind == PRESENT_AT);
                break;
            case ABSENT:
            case PRESENT: {
                MDB_cursor **cursor = &cursors[op->group];
                if (!*cursor && mdb.cursor_open(txn, env->dbis[op->group], cursor))
                    goto back;
                rc = mdb.cursor_get(*cursor, &key, &value, MDB_SET_RANGE);
                if (rc && rc != MDB_NOTFOUND)
                    goto back;
                int found = !rc && compare(key.mv_data, key.mv_size, batch->bytes + op->last, op->size) <= 0;
                holds = found == (op->kind == PRESENT);
                break;
            }
            case PUT:
                value.mv_size = op->value ? (size_t)PyBytes_GET_SIZE(op->value) : 0;
                value.mv_data = op->value ? PyBytes_AS_STRING(op->value) : "";
                if (mdb.put(txn, env->dbis[op->group], &key, &value, 0))
                    goto back;
                break;
            case DELETE:
                rc = mdb.del(txn, env->dbis[op->group], &key, NULL);
                if (rc && rc != MDB_NOTFOUND)
                    goto back;
                break;
            }
            if (!holds) {
                verdict[0] = (int32_t)op->row;
                verdict[1] = (int32_t)op->check;
            }
        }
        any |= holds;
    }
    for (int g = 0; g < env->groups; g++)
        if (cursors[g])
            mdb.cursor_close(cursors[g]);
    batch->txn_id = mdb.txn_id(txn);
    if (!any) {
        mdb.txn_abort(txn);
        return 0;
    }
    batch->rc = mdb.txn_commit(txn);
    return batch->rc ? -1 : 0;
back:
    for (int g = 0; g < env->groups; g++)
        if (cursors[g])
            mdb.cursor_close(cursors[g]);
    mdb.txn_abort(txn);
    return 1;
}

static PyObject *
verdicts_of(Batch *batch)
{
    PyObject *out = PyList_New((Py_ssize_t)batch->n_mutations);
    for (size_t i = 0; out && i < batch->n_mutations; i++) {
        const int32_t *verdict = batch->verdicts[i];
        PyObject *made = applied;
        if (verdict[0] == -1)
            Py_INCREF(made);
        else
            made = PyObject_CallFunction(refused, "ii", (int)verdict[0], (int)verdict[1]);
        if (!made)
            Py_CLEAR(out);
        else
            PyList_SET_ITEM(out, (Py_ssize_t)i, made);
    }
    return out;
}

/* (LMDB's error, its text, the transaction's number) */
static PyObject *
failure_of(Batch *batch)
{
    return Py_BuildValue("(isn)", batch->rc, mdb.strerror(batch->rc), (Py_ssize_t)batch->txn_id);
}

/* apply(mutations, need, floor, empty) -> verdicts; None: Python has to write them; or see `failure_of`. */
PyObject *
Environment_apply(Environment *self, PyObject *args)
{
    PyObject *mutations, *empty, *out = NULL;
    Py_ssize_t need;
    unsigned long long floor;
    if (!PyArg_ParseTuple(args, "OnKO", &mutations, &need, &floor, &empty))
        return NULL;
    Batch *batch = encode(self, mutations, empty, 1);
    if (!batch)
        Py_RETURN_NONE;
    batch->need = need;
    int done;
    Py_BEGIN_ALLOW_THREADS
    done = run(batch, floor);
    Py_END_ALLOW_THREADS
    if (done == 0)
        out = verdicts_of(batch);
    else if (done < 0)
        out = failure_of(batch);
    else {
        Py_INCREF(Py_None);
        out = Py_None;
    }
    free_batch(batch);
    return out;
}

/* ------------------------------------------------------------ batches that have ended */

typedef struct {
    PyObject_HEAD
    pthread_mutex_t mutex;
    Batch *first, *last;
    int wake;
    int closed; /* the loop listens no more: writers return their batches to Python */
} Completions;

static int
Completions_init(Completions *self, PyObject *args, PyObject *kwargs)
{
    if (!PyArg_ParseTuple(args, ""))
        return -1;
    pthread_mutex_init(&self->mutex, NULL);
    self->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (self->wake < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    return 0;
}

static void
Completions_dealloc(Completions *self)
{
    for (Batch *batch = self->first, *next; batch; batch = next) {
        next = batch->next;
        free_batch(batch);
    }
    if (self->wake >= 0)
        close(self->wake);
    pthread_mutex_destroy(&self->mutex);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *
Completions_fileno(Completions *self, PyObject *unused)
{
    return PyLong_FromLong(self->wake);
}

/* take() -> [(work, verdicts, seconds, when it ended)]: the batches that have ended since the last call. */
static PyObject *
Completions_take(Completions *self, PyObject *unused)
{
    uint64_t times;
    if (read(self->wake, &times, sizeof times) < 0 && errno != EAGAIN)
        return PyErr_SetFromErrno(PyExc_OSError);
    pthread_mutex_lock(&self->mutex);
    Batch *batch = self->first;
    self->first = self->last = NULL;
    pthread_mutex_unlock(&self->mutex);
    PyObject *out = PyList_New(0);
    for (Batch *next; batch; batch = next) {
        next = batch->next;
        PyObject *verdicts = out ? verdicts_of(batch) : NULL;
        PyObject *item = verdicts ? Py_BuildValue("(OOdd)", batch->work, verdicts, batch->ended - batch->began,
                                                  batch->ended)
                                  : NULL;
        Py_XDECREF(verdicts);
        if (!item || PyList_Append(out, item))
            Py_CLEAR(out);
        Py_XDECREF(item);
        free_batch(batch);
    }
    return out;
}

/* close(): the loop calls `take` once more, and then never again. */
static PyObject *
Completions_close(Completions *self, PyObject *unused)
{
    pthread_mutex_lock(&self->mutex);
    self->closed = 1;
    pthread_mutex_unlock(&self->mutex);
    Py_RETURN_NONE;
}

/* ------------------------------------------------------------ the writer's thread */

typedef struct {
    PyObject_HEAD
    pthread_mutex_t mutex;
    pthread_cond_t more;
    Batch *first, *last;
    Completions *completions;
    unsigned long long floor; /* T13 */
    char divert;              /* every batch goes to Python: see lmdb_tablet.py */
    char busy;                /* a batch is being written */
} Writer;

static int
Writer_init(Writer *self, PyObject *args, PyObject *kwargs)
{
    PyObject *completions;
    if (!PyArg_ParseTuple(args, "O!", &CompletionsType, &completions))
        return -1;
    pthread_mutex_init(&self->mutex, NULL);
    pthread_cond_init(&self->more, NULL);
    Py_INCREF(completions);
    self->completions = (Completions *)completions;
    return 0;
}

static void
Writer_dealloc(Writer *self)
{
    for (Batch *batch = self->first, *next; batch; batch = next) {
        next = batch->next;
        free_batch(batch);
    }
    Py_XDECREF((PyObject *)self->completions);
    pthread_cond_destroy(&self->more);
    pthread_mutex_destroy(&self->mutex);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static void
enqueue(Writer *self, Batch *batch)
{
    pthread_mutex_lock(&self->mutex);
    if (self->last)
        self->last->next = batch;
    else
        self->first = batch;
    self->last = batch;
    pthread_cond_signal(&self->more);
    pthread_mutex_unlock(&self->mutex);
}

/* put(work): queue work that `get` returns, behind all batches. */
static PyObject *
Writer_put(Writer *self, PyObject *work)
{
    Batch *batch = calloc(1, sizeof *batch);
    if (!batch)
        return PyErr_NoMemory();
    Py_INCREF(work);
    batch->work = work;
    enqueue(self, batch);
    Py_RETURN_NONE;
}

/* submit(environment, entries, need, empty, work) -> whether the batch is queued; False: Python has to write it. */
static PyObject *
Writer_submit(Writer *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 5 || !Py_IS_TYPE(args[0], &EnvironmentType) || !PyLong_Check(args[2]))
        return PyErr_Format(PyExc_TypeError, "submit(environment, entries, need, empty, work)");
    Py_ssize_t need = PyLong_AsSsize_t(args[2]);
    if (need == -1 && PyErr_Occurred())
        return NULL;
    Batch *batch = encode((Environment *)args[0], args[1], args[3], 0);
    if (!batch)
        Py_RETURN_FALSE;
    batch->need = need;
    Py_INCREF(args[4]);
    batch->work = args[4];
    enqueue(self, batch);
    Py_RETURN_TRUE;
}

/* get() -> work: the next work for Python. Until then, batches are written, without the interpreter. A batch that Python
   has to write is returned as (work, None); one whose commit failed, as (work, failure); and one for which no loop
   listens any more, as (work, verdicts). */
static PyObject *
Writer_get(Writer *self, PyObject *unused)
{
    Batch *batch;
    int done = 0;
    Py_BEGIN_ALLOW_THREADS
    for (;;) {
        pthread_mutex_lock(&self->mutex);
        while (!self->first)
            pthread_cond_wait(&self->more, &self->mutex);
        batch = self->first;
        self->first = batch->next;
        if (!self->first)
            self->last = NULL;
        batch->next = NULL;
        self->busy = batch->env != NULL;
        pthread_mutex_unlock(&self->mutex);
        if (!batch->env)
            break;
        done = 1;
        batch->began = now();
        if (!self->divert)
            done = run(batch, __atomic_load_n(&self->floor, __ATOMIC_ACQUIRE));
        batch->ended = now();
        if (done)
            break;
        Completions *to = self->completions;
        pthread_mutex_lock(&to->mutex);
        if (to->closed) {
            pthread_mutex_unlock(&to->mutex);
            break;
        }
        self->busy = 0;
        int first = !to->first;
        if (to->last)
            to->last->next = batch;
        else
            to->first = batch;
        to->last = batch;
        pthread_mutex_unlock(&to->mutex);
        uint64_t one = 1;
        if (first && write(to->wake, &one, sizeof one) < 0) {
            /* the counter is full: the loop has been woken already */
        }
    }
    Py_END_ALLOW_THREADS
    PyObject *out;
    if (!batch->env) {
        Py_INCREF(batch->work);
        out = batch->work;
    }
    else
        out = Py_BuildValue("(ON)", batch->work,
                            done < 0 ? failure_of(batch) : done > 0 ? Py_NewRef(Py_None) : verdicts_of(batch));
    self->busy = 0;
    free_batch(batch);
    return out;
}

static PyMethodDef Completions_methods[] = {
    {"fileno", (PyCFunction)Completions_fileno, METH_NOARGS, NULL},
    {"take", (PyCFunction)Completions_take, METH_NOARGS, NULL},
    {"close", (PyCFunction)Completions_close, METH_NOARGS, NULL},
    {0},
};

PyTypeObject CompletionsType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "perco.storage._native.Completions",
    .tp_basicsize = sizeof(Completions),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Completions_init,
    .tp_dealloc = (destructor)Completions_dealloc,
    .tp_methods = Completions_methods,
};

static PyMethodDef Writer_methods[] = {
    {"submit", (PyCFunction)(void (*)(void))Writer_submit, METH_FASTCALL, NULL},
    {"put", (PyCFunction)Writer_put, METH_O, NULL},
    {"get", (PyCFunction)Writer_get, METH_NOARGS, NULL},
    {0},
};

static PyMemberDef Writer_members[] = {
    {"floor", T_ULONGLONG, offsetof(Writer, floor), 0, NULL},
    {"divert", T_BOOL, offsetof(Writer, divert), 0, NULL},
    {"busy", T_BOOL, offsetof(Writer, busy), READONLY, NULL},
    {0},
};

PyTypeObject WriterType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "perco.storage._native.Writer",
    .tp_basicsize = sizeof(Writer),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Writer_init,
    .tp_dealloc = (destructor)Writer_dealloc,
    .tp_methods = Writer_methods,
    .tp_members = Writer_members,
};

/* ------------------------------------------------------------ the module */

/* use(py-lmdb's shared object, APPLIED, Refused, escape, unescape): find LMDB's functions, once. Raises: Unverified. */
static PyObject *
use(PyObject *module, PyObject *args)
{
    const char *path;
    PyObject *given[4];
    if (!PyArg_ParseTuple(args, "yOOOO", &path, &given[0], &given[1], &given[2], &given[3]))
        return NULL;
    void *library = dlopen(path, RTLD_NOLOAD | RTLD_NOW | RTLD_LOCAL); /* it stays loaded: Python has imported it */
    if (!library)
        return PyErr_Format(Unverified, "py-lmdb's shared object is not loaded: %s", path);
    if (load_lmdb(library, "mdb_") && load_lmdb(library, "mdb09_")) {
        memset(&mdb, 0, sizeof mdb);
        return PyErr_Format(Unverified, "%s does not export LMDB's functions", path);
    }
    void *table = dlsym(library, "lmdb_api_v09");
    if (table)
        api = PyLong_FromVoidPtr(table);
    else {
        api = Py_None;
        Py_INCREF(api);
    }
    PyObject **kept[4] = {&applied, &refused, &py_escape, &py_unescape};
    for (int i = 0; i < 4; i++) {
        Py_INCREF(given[i]);
        Py_XSETREF(*kept[i], given[i]);
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"use", use, METH_VARARGS, NULL},
    {"columns", leaf_columns, METH_VARARGS, NULL},
    {"pages", leaf_pages, METH_VARARGS, NULL},
    {0},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "perco.storage._native", .m_size = -1, .m_methods = methods,
};

PyMODINIT_FUNC
PyInit__native(void)
{
    PyObject *module = PyModule_Create(&definition);
    PyTypeObject *types[] = {&EnvironmentType, &WriterType, &CompletionsType};
    for (int i = 0; module && i < 3; i++)
        if (PyModule_AddType(module, types[i]))
            Py_CLEAR(module);
    if (module && !(Unverified = PyErr_NewException("perco.storage._native.Unverified", PyExc_RuntimeError, NULL)))
        Py_CLEAR(module);
    if (module && PyModule_AddObjectRef(module, "Unverified", Unverified))
        Py_CLEAR(module);
    return module;
}
