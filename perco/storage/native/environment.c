/* An environment that py-lmdb has opened; keys. See native.h. */

#include "native.h"
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ZEROS 32 /* from so many zero bytes in a row on, Python writes its prefix */

struct lmdb mdb;
PyObject *Unverified, *applied, *refused, *py_escape, *py_unescape, *api;

int
load_lmdb(void *library, const char *prefix)
{
    char name[64];
    struct { const char *name; void *at; } wanted[] = {
#define WANTED(f) {#f, &mdb.f}
        WANTED(env_get_path), WANTED(env_get_fd), WANTED(env_get_flags), WANTED(env_stat), WANTED(env_info), WANTED(txn_begin),
        WANTED(txn_id), WANTED(txn_commit), WANTED(txn_abort), WANTED(txn_reset), WANTED(txn_renew),
        WANTED(dbi_open), WANTED(get), WANTED(put), WANTED(del), WANTED(cursor_open), WANTED(cursor_close),
        WANTED(cursor_renew), WANTED(cursor_get), WANTED(strerror),
#undef WANTED
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        snprintf(name, sizeof name, "%s%s", prefix, wanted[i].name);
        if (!(*(void **)wanted[i].at = dlsym(library, name)))
            return -1;
    }
    return 0;
}

/* Copy `size` bytes from an address that may be anything. Returns whether all of them can be read. */
static int
copy_of(const int *ends, const void *at, void *out, size_t size)
{
    /* Not `write`: under AddressSanitizer, that would look at the address itself. */
    ssize_t n = syscall(SYS_write, ends[1], at, size); /* EFAULT, or fewer bytes, if it cannot be read */
    for (ssize_t left = n; left > 0;) {
        ssize_t got = read(ends[0], (char *)out + (n - left), (size_t)left);
        if (got <= 0)
            return 0;
        left -= got;
    }
    return n == (ssize_t)size;
}

/* Whether an address is that of the environment that py-lmdb describes. LMDB's functions are asked only if the memory
   looks right: the kernel says whether it can be read, and an MDB_env begins with its page size, its process's PID, and
   the address of its path, among other things. */
static int
is_env(void *at, const int *ends, const char *path, size_t page, size_t map)
{
    unsigned words[32];
    if (((uintptr_t)at & 7) || (uintptr_t)at < 4096 || !copy_of(ends, at, words, sizeof words))
        return 0;
    int has_page = 0, has_pid = 0, has_path = 0;
    for (int i = 0; i < 12; i++) {
        has_page |= words[i] == page;
        has_pid |= words[i] == (unsigned)getpid();
    }
    if (!has_page || !has_pid)
        return 0;
    const void *pointers[16];
    char name[4096];
    size_t size = strlen(path) + 1;
    memcpy(pointers, words, sizeof pointers);
    for (int i = 1; i < 16 && !has_path && size <= sizeof name; i++)
        has_path = (uintptr_t)pointers[i] >= 4096 && copy_of(ends, pointers[i], name, size) &&
                   !memcmp(name, path, size);
    if (!has_path)
        return 0;
    const char *found = NULL;
    int file;
    unsigned flags = 0;
    MDB_stat stat_;
    MDB_envinfo info;
    struct stat here, there;
    return !mdb.env_get_path(at, &found) && found && !strcmp(found, path) && !mdb.env_get_flags(at, &flags) &&
           (flags & MDB_NOTLS) && !mdb.env_stat(at, &stat_) && stat_.psize == page && !mdb.env_info(at, &info) &&
           info.mapsize == map && !mdb.env_get_fd(at, &file) && !fstat(file, &here) &&
           snprintf(name, sizeof name, "%s/data.mdb", path) < (int)sizeof name && !stat(name, &there) &&
           here.st_ino == there.st_ino && here.st_dev == there.st_dev;
}

/* py-lmdb's object has the address of its MDB_env at an offset that its releases may change. So every word of the object
   is examined, and exactly one has to be an environment with this path, this page size and this map. If py-lmdb has two
   versions of LMDB, the object also has to name the functions of the one that is used here. */
static MDB_env *
find_env(PyObject *owner, const char *path, size_t page, size_t map)
{
    int ends[2], several = 0, named = api == Py_None;
    MDB_env *found = NULL;
    if (pipe2(ends, O_CLOEXEC | O_NONBLOCK))
        return NULL;
    Py_ssize_t words = Py_TYPE(owner)->tp_basicsize / (Py_ssize_t)sizeof(void *);
    void **at = (void **)owner;
    for (Py_ssize_t i = 2; i < words; i++) {
        named |= api != Py_None && at[i] == PyLong_AsVoidPtr(api);
        if (at[i] != found && is_env(at[i], ends, path, page, map)) {
            several |= found != NULL;
            found = at[i];
        }
    }
    close(ends[0]);
    close(ends[1]);
    return named && !several ? found : NULL;
}

/* Environment(py-lmdb's environment, its path, page size, map size) */
static int
Environment_init(Environment *self, PyObject *args, PyObject *kwargs)
{
    PyObject *owner;
    const char *path;
    Py_ssize_t page, map;
    if (!PyArg_ParseTuple(args, "Oynn", &owner, &path, &page, &map))
        return -1;
    if (!mdb.strerror || !applied) {
        PyErr_SetString(Unverified, "`use` was not called");
        return -1;
    }
    self->env = find_env(owner, path, (size_t)page, (size_t)map);
    if (!self->env) {
        PyErr_SetString(Unverified, "py-lmdb's environment was not recognized");
        return -1;
    }
    MDB_txn *txn;
    int rc = mdb.txn_begin(self->env, NULL, MDB_RDONLY, &txn);
    if (!rc) {
        rc = mdb.dbi_open(txn, NULL, 0, &self->main);
        mdb.txn_abort(txn);
    }
    if (rc) {
        PyErr_Format(Unverified, "LMDB: %s", mdb.strerror(rc));
        return -1;
    }
    self->page = (size_t)page;
    self->log = self->write = -1;
    Py_INCREF(owner);
    self->owner = owner;
    return 0;
}

/* add(name): make a group known that the environment has. */
static PyObject *
Environment_add(Environment *self, PyObject *name)
{
    const char *text = PyUnicode_Check(name) ? PyUnicode_AsUTF8(name) : NULL;
    if (!text || !self->env || self->groups >= GROUPS_MAX)
        return PyErr_Format(Unverified, "this group cannot be used: %R", name);
    MDB_txn *txn;
    MDB_dbi dbi;
    int rc = mdb.txn_begin(self->env, NULL, MDB_RDONLY, &txn);
    if (!rc) {
        rc = mdb.dbi_open(txn, text, 0, &dbi);
        if (rc)
            mdb.txn_abort(txn);
        else
            rc = mdb.txn_commit(txn);
    }
    if (rc)
        return PyErr_Format(Unverified, "group %R: %s", name, mdb.strerror(rc));
    if (!strcmp(text, "log"))
        self->log = self->groups;
    if (!strcmp(text, "write"))
        self->write = self->groups;
    Py_INCREF(name);
    PyUnicode_InternInPlace(&name);
    self->names[self->groups] = name;
    self->dbis[self->groups++] = dbi;
    Py_RETURN_NONE;
}

void
end_view(Environment *self)
{
    if (self->open) {
        mdb.txn_reset(self->view);
        self->open = 0;
        memset(self->fresh, 0, sizeof self->fresh);
    }
}

/* end_shared(): later reads use a newer view. */
static PyObject *
Environment_end_shared(Environment *self, PyObject *unused)
{
    end_view(self);
    Py_RETURN_NONE;
}

/* close(): end all that keeps the environment open; then py-lmdb closes it. */
static PyObject *
Environment_close(Environment *self, PyObject *unused)
{
    for (int i = 0; i < self->groups; i++)
        if (self->cursors[i])
            mdb.cursor_close(self->cursors[i]);
    memset(self->cursors, 0, sizeof self->cursors);
    if (self->view)
        mdb.txn_abort(self->view);
    self->view = NULL;
    self->env = NULL;
    self->open = 0;
    Py_RETURN_NONE;
}

/* lose(): LMDB has lost the environment, and nothing of it may be touched any more. */
static PyObject *
Environment_lose(Environment *self, PyObject *unused)
{
    memset(self->cursors, 0, sizeof self->cursors);
    self->view = NULL;
    self->env = NULL;
    self->open = 0;
    Py_RETURN_NONE;
}

static void
Environment_dealloc(Environment *self)
{ /* Without `close`, as in a forked child, the view is left as it is: it is the parent's. */
    for (int i = 0; i < self->groups; i++)
        Py_DECREF(self->names[i]);
    Py_XDECREF(self->owner);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

int
group_of(Environment *self, PyObject *name)
{
    for (int i = 0; i < self->groups; i++)
        if (self->names[i] == name)
            return i;
    for (int i = 0; i < self->groups; i++)
        if (PyUnicode_Check(name) && PyUnicode_Compare(self->names[i], name) == 0)
            return i;
    return -1;
}

/* A cursor of the open view, which is opened if there is none. */
MDB_cursor *
cursor_of(Environment *self, int group)
{
    if (!self->env)
        return NULL;
    if (!self->open) {
        if (self->view ? mdb.txn_renew(self->view) : mdb.txn_begin(self->env, NULL, MDB_RDONLY, &self->view))
            return NULL;
        self->open = 1;
    }
    if (!self->cursors[group]) {
        if (mdb.cursor_open(self->view, self->dbis[group], &self->cursors[group]))
            return NULL;
    }
    else if (!self->fresh[group] && mdb.cursor_renew(self->view, self->cursors[group]))
        return NULL;
    self->fresh[group] = 1;
    return self->cursors[group];
}

/* fence(epoch): from now on, batches need this epoch (F1). */
static PyObject *
Environment_fence(Environment *self, PyObject *epoch)
{
    if (!PyBytes_Check(epoch) || PyBytes_GET_SIZE(epoch) != sizeof self->epoch)
        return PyErr_Format(PyExc_ValueError, "an epoch has 8 bytes");
    memcpy(self->epoch, PyBytes_AS_STRING(epoch), sizeof self->epoch);
    self->fenced = 1;
    Py_RETURN_NONE;
}

/* ------------------------------------------------------------ keys (keys.py) */

/* Write a row's prefix; returns its length, or 0 if it has none that fits. */
size_t
prefix_of(PyObject *row, char *out)
{
    const char *at = PyBytes_AS_STRING(row);
    size_t size = (size_t)PyBytes_GET_SIZE(row), n = 0, zeros = 0;
    const size_t most = KEY_MAX - TAIL - 2;
    if (size > most)
        return 0;
    if (!memchr(at, 0, size)) {
        memcpy(out, at, size);
        n = size;
    }
    else {
        for (size_t i = 0; i < size; i++)
            zeros += !at[i];
        if (zeros >= ZEROS) {
            PyObject *made = PyObject_CallOneArg(py_escape, row);
            if (made && PyBytes_Check(made) && PyBytes_GET_SIZE(made) <= KEY_MAX - TAIL) {
                n = (size_t)PyBytes_GET_SIZE(made);
                memcpy(out, PyBytes_AS_STRING(made), n);
            }
            PyErr_Clear();
            Py_XDECREF(made);
            return n;
        }
        if (size + zeros > most)
            return 0;
        for (size_t i = 0; i < size; i++) {
            out[n++] = at[i];
            if (!at[i])
                out[n++] = (char)0xff;
        }
    }
    out[n++] = 0;
    out[n++] = 1;
    return n;
}

/* The row of a prefix. Returns NULL, perhaps with an exception, if Python has to look at it. */
PyObject *
row_of(const char *prefix, size_t size)
{
    if (size < 2)
        return NULL;
    const char *nul = memchr(prefix, 0, size);
    if (nul == prefix + size - 2 && nul[1] == 1)
        return PyBytes_FromStringAndSize(prefix, (Py_ssize_t)size - 2);
    char out[KEY_MAX];
    size_t n = 0, zeros = 0;
    for (size_t i = 0; i + 1 < size && size <= KEY_MAX && zeros < ZEROS;) {
        if (prefix[i])
            out[n++] = prefix[i++];
        else if ((unsigned char)prefix[i + 1] == 0xff) {
            out[n++] = 0;
            zeros++;
            i += 2;
        }
        else if (prefix[i + 1] == 1 && i + 2 == size)
            return PyBytes_FromStringAndSize(out, (Py_ssize_t)n);
        else
            break;
    }
    PyObject *made = PyBytes_FromStringAndSize(prefix, (Py_ssize_t)size);
    PyObject *row = made ? PyObject_CallOneArg(py_unescape, made) : NULL;
    Py_XDECREF(made);
    return row;
}

/* ------------------------------------------------------------ the type */

static PyMethodDef Environment_methods[] = {
    {"add", (PyCFunction)Environment_add, METH_O, NULL},
    {"fence", (PyCFunction)Environment_fence, METH_O, NULL},
    {"read", (PyCFunction)(void (*)(void))Environment_read, METH_FASTCALL, NULL},
    {"scan", (PyCFunction)Environment_scan, METH_VARARGS, NULL},
    {"scan_log", (PyCFunction)Environment_scan_log, METH_VARARGS, NULL},
    {"apply", (PyCFunction)Environment_apply, METH_VARARGS, NULL},
    {"end_shared", (PyCFunction)Environment_end_shared, METH_NOARGS, NULL},
    {"close", (PyCFunction)Environment_close, METH_NOARGS, NULL},
    {"lose", (PyCFunction)Environment_lose, METH_NOARGS, NULL},
    {0},
};

static PyMemberDef Environment_members[] = {
    {"limit", T_PYSSIZET, offsetof(Environment, limit), 0, NULL},
    {"open", T_INT, offsetof(Environment, open), READONLY, NULL},
    {0},
};

PyTypeObject EnvironmentType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "perco.storage._native.Environment",
    .tp_basicsize = sizeof(Environment),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Environment_init,
    .tp_dealloc = (destructor)Environment_dealloc,
    .tp_methods = Environment_methods,
    .tp_members = Environment_members,
};
