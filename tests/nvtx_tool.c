/* A tool as NVTX loads it (NVTX_INJECTION64_PATH): prints the ranges of every domain, one event a line.

   A push is "push DEPTH MESSAGE CATEGORY", and behind it the payload as 32-bit integers if it has a schema. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef void (*function)(void);

typedef struct {
    size_t size;
    int (*module_table)(int module, function ***table, unsigned *size);
} callbacks;

typedef struct {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, num_extended;
    uint64_t payload;
    int32_t message_type;
    const char *message;
} attributes;

typedef struct {
    uint64_t schema;
    size_t size;
    const void *data;
} extended;

enum { CALLBACKS = 1, CORE2 = 5 };
enum { PUSH = 4, POP = 5, NAME_CATEGORY = 8, REGISTER_STRING = 10, CREATE_DOMAIN = 12 };

static const char *categories[64];
static int depth;

static void *create_domain(const char *name) {
    printf("domain %s\n", name);
    return &depth;
}

static const char *register_string(void *domain, const char *text) { return strdup(text); }

static void name_category(void *domain, uint32_t id, const char *name) { categories[id % 64] = strdup(name); }

static int push(void *domain, const attributes *a) {
    printf("push %d %s %s", depth, a->message, categories[a->category % 64]);
    if (a->num_extended == 1) {
        const extended *e = (const extended *)a->payload;
        for (size_t i = 0; i < e->size / 4; i++) printf(" %d", ((const int32_t *)e->data)[i]);
    }
    printf("\n");
    return depth++;
}

static int pop(void *domain) {
    printf("pop\n");
    return --depth;
}

int InitializeInjectionNvtx2(const void *(*export_table)(uint32_t)) {
    function **table;
    unsigned size;
    const callbacks *c = export_table(CALLBACKS);
    if (!c->module_table(CORE2, &table, &size)) return 0;
    *table[PUSH] = (function)push;
    *table[POP] = (function)pop;
    *table[NAME_CATEGORY] = (function)name_category;
    *table[REGISTER_STRING] = (function)register_string;
    *table[CREATE_DOMAIN] = (function)create_domain;
    setvbuf(stdout, NULL, _IOLBF, 0);
    return 1;
}
