// What Baton asks of the CUDA driver: the mapping of this process that an address lies in.
#include <cstdint>
#include <cstdio>

extern "C" int cuMemGetAddressRange_v2(uint64_t* start, size_t* bytes, uint64_t address) {
    FILE* maps = fopen("/proc/self/maps", "r");
    char line[4096];
    int found = 1;  // CUDA_ERROR_INVALID_VALUE
    while (found && fgets(line, sizeof line, maps)) {
        unsigned long begin, end;
        if (sscanf(line, "%lx-%lx", &begin, &end) != 2) continue;
        if (begin > address || address >= end) continue;
        *start = begin, *bytes = end - begin, found = 0;
    }
    fclose(maps);
    return found;
}

// A map as tests/cuda/host/hopper_words.h reads it. Only what Baton asks for is made, after the driver's checks.
extern "C" int cuTensorMapEncodeTiled(uint64_t* map, int type, uint32_t rank, void* address, const uint64_t* sizes,
                                      const uint64_t* strides, const uint32_t* box, const uint32_t* steps,
                                      int interleave, int swizzle, int promotion, int outside) {
    const bool aligned = reinterpret_cast<uint64_t>(map) % 64 == 0 &&
                         reinterpret_cast<uint64_t>(address) % 16 == 0 && strides[0] % 16 == 0;
    const bool matrix = type == 1 && rank == 2 && strides[0] == 2 * sizes[0] && steps[0] == 1 && steps[1] == 1;
    const bool boxes = box[0] == 64 && box[1] >= 1 && box[1] <= 256 && sizes[1] >= 1 && sizes[1] <= 1ull << 32;
    if (!aligned || !matrix || !boxes || interleave || swizzle != 3 || promotion > 3 || outside)
        return 1;  // CUDA_ERROR_INVALID_VALUE
    for (int i = 0; i < 16; i++) map[i] = 0;
    map[0] = 0x70616d5f6f746162ull, map[1] = reinterpret_cast<uint64_t>(address);
    map[2] = sizes[1], map[3] = sizes[0], map[4] = box[1];
    return 0;
}

// Launches that may begin early. What the hook returns is the driver's answer.
struct Attribute {
    int id;
    char pad[4];
    int value[16];
};
struct Config {
    unsigned grid[3], block[3], shared_bytes;
    void* stream;
    const Attribute* attributes;
    unsigned count;
};
using Hook = int (*)(void* function, const unsigned* grid, const unsigned* block, unsigned shared_bytes, void* stream,
                     void** values);
static Hook hook;
extern "C" void baton_on_launch(Hook found) { hook = found; }
extern "C" int cuLaunchKernelEx(const Config* config, void* function, void** values, void** extra) {
    const bool early = config->count == 1 && config->attributes[0].id == 6 && config->attributes[0].value[0] == 1;
    if (!hook || !early || extra) return 1;
    return hook(function, config->grid, config->block, config->shared_bytes, config->stream, values);
}
