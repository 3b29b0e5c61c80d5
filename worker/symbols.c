/* symbols.h */
#include "worker/symbols.h"

#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { NAME_SHOWN = 160 };

/* Of the C++ library, which the worker links with: *status 0 and a text of malloc(). */
char *__cxa_demangle(const char *mangled, char *buffer, size_t *length, int *status);

struct symbol {
    uintptr_t from, to; /* relative to where the file is loaded */
    const char *name;   /* in the mapped file */
};

struct module {
    struct module *next;
    char *path;
    void *map;
    size_t size;
    struct symbol *list; /* by `from` */
    size_t n;
};

struct symbols {
    struct module *modules;
};

static int by_start(const void *x, const void *y)
{
    const struct symbol *a = x, *b = y;
    return (a->from > b->from) - (a->from < b->from);
}

static bool inside(const struct module *m, uint64_t offset, uint64_t size)
{
    return offset <= m->size && size <= m->size - offset;
}

/* The functions of one table; the file may be damaged or not what is loaded. */
static void take_table(struct module *m, const ElfW(Shdr) *table, const ElfW(Shdr) *names)
{
    if (!inside(m, table->sh_offset, table->sh_size) || !inside(m, names->sh_offset, names->sh_size) || !names->sh_size)
        return;
    const char *text = (const char *)m->map + names->sh_offset;
    const ElfW(Sym) *symbols = (const void *)((const char *)m->map + table->sh_offset);
    size_t n = table->sh_size / sizeof *symbols;
    if (table->sh_offset % _Alignof(ElfW(Sym)) || text[names->sh_size - 1])
        return;
    m->list = malloc((n ? n : 1) * sizeof *m->list);
    for (size_t i = 0; m->list && i < n; i++) {
        const ElfW(Sym) *s = &symbols[i];
        int type = ELF64_ST_TYPE(s->st_info);
        if ((type != STT_FUNC && type != STT_GNU_IFUNC) || !s->st_shndx || !s->st_value || s->st_name >= names->sh_size)
            continue;
        m->list[m->n++] = (struct symbol){s->st_value, s->st_value + s->st_size, text + s->st_name};
    }
    if (m->n)
        qsort(m->list, m->n, sizeof *m->list, by_start);
}

/* The full table where the file has one, else what it exports. */
static void take_symbols(struct module *m)
{
    const ElfW(Ehdr) *head = m->map;
    if (m->size < sizeof *head || memcmp(head->e_ident, ELFMAG, SELFMAG) != 0 ||
        head->e_shentsize != sizeof(ElfW(Shdr)) || head->e_shoff % _Alignof(ElfW(Shdr)) ||
        !inside(m, head->e_shoff, (uint64_t)head->e_shnum * sizeof(ElfW(Shdr))))
        return;
    const ElfW(Shdr) *sections = (const void *)((const char *)m->map + head->e_shoff);
    const ElfW(Shdr) *best = NULL;
    for (int i = 0; i < head->e_shnum; i++)
        if (sections[i].sh_type == SHT_SYMTAB || (sections[i].sh_type == SHT_DYNSYM && !best))
            best = &sections[i];
    if (best && best->sh_link < head->e_shnum)
        take_table(m, best, &sections[best->sh_link]);
}

static void map_file(struct module *m)
{
    struct stat st;
    int fd = open(m->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return;
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_size > 0) {
        void *map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (map != MAP_FAILED) {
            m->map = map;
            m->size = (size_t)st.st_size;
            take_symbols(m);
        }
    }
    close(fd);
}

static struct module *module_of(struct symbols *s, const char *path)
{
    for (struct module *m = s->modules; m; m = m->next)
        if (!strcmp(m->path, path))
            return m;
    struct module *m = calloc(1, sizeof *m);
    if (!m || !(m->path = strdup(path))) {
        free(m);
        return NULL;
    }
    map_file(m);
    m->next = s->modules;
    s->modules = m;
    return m;
}

/* The last one that begins at or before the address and reaches beyond it; one without a size reaches to the next. */
static const struct symbol *find(const struct module *m, uintptr_t at)
{
    size_t low = 0, high = m->n;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (m->list[middle].from <= at)
            low = middle + 1;
        else
            high = middle;
    }
    for (size_t i = low; i > 0 && low - i < 8; i--) {
        const struct symbol *x = &m->list[i - 1];
        if (at < x->to || x->to == x->from)
            return x;
    }
    return NULL;
}

static void print_symbol(const struct symbol *x, uintptr_t at, const char *file, char *out, size_t cap)
{
    int status = -1;
    char *plain = !strncmp(x->name, "_Z", 2) ? __cxa_demangle(x->name, NULL, NULL, &status) : NULL;
    const char *name = plain && !status ? plain : x->name;
    snprintf(out, cap, "%.*s%s+0x%zx (%s)", NAME_SHOWN, name, strlen(name) > NAME_SHOWN ? "..." : "",
             (size_t)(at - x->from), file);
    free(plain);
}

char *symbols_describe(struct symbols *s, uintptr_t pc, bool returns, char *out, size_t cap)
{
    struct dl_find_object o;
    char self[4096];
    uintptr_t looked = pc - (returns && pc); /* the call itself: a function may end with it */
    if (_dl_find_object((void *)looked, &o) < 0) {
        snprintf(out, cap, "code without a file");
        return out;
    }
    const char *path = o.dlfo_link_map->l_name;
    if (!path || !*path) { /* the program */
        ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
        self[n > 0 ? n : 0] = '\0';
        path = self;
    }
    const char *slash = strrchr(path, '/'), *file = slash ? slash + 1 : path;
    const struct module *m = module_of(s, path);
    uintptr_t at = looked - o.dlfo_link_map->l_addr;
    const struct symbol *x = m ? find(m, at) : NULL;
    if (x)
        print_symbol(x, at + (returns && pc), file, out, cap);
    else
        snprintf(out, cap, "%s+0x%zx", file, (size_t)(at + (returns && pc)));
    return out;
}

struct symbols *symbols_new(void)
{
    return calloc(1, sizeof(struct symbols));
}

void symbols_free(struct symbols *s)
{
    while (s && s->modules) {
        struct module *m = s->modules;
        s->modules = m->next;
        if (m->map)
            munmap(m->map, m->size);
        free(m->list);
        free(m->path);
        free(m);
    }
    free(s);
}
