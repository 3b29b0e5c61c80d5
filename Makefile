# BOOST: build, test, demo. Everything made goes below $(BUILD).
#
#   make            binaries in build/bin
#   make demo       set up, build, train the example, kill a worker, see it recover
#   make test       set up, build, run every test
#   make bench      benchmarks into build/bench.jsonl
#   make lint       house rules (tests/lint.sh), cppcheck where it is installed
#
# A room (folder) is a library; sources are found by folder, so a new file needs
# no line here. Dependencies between rooms are the L_* lists below.

BUILD ?= build
CC ?= gcc
CXX ?= g++
PROTOC_C ?= protoc-c
OPT ?= -O2 -g

WARN = -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith \
       -Wvla -Wformat=2 -Wno-format-truncation
WARNXX = -Wall -Wextra -Wshadow -Wpointer-arith -Wvla -Wformat=2
ifeq ($(CI),true)
WARN += -Werror
WARNXX += -Werror
endif

VERSION = 0.1.0
COMMIT := $(shell git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)

CPPFLAGS += -D_GNU_SOURCE -I. -I$(BUILD)/gen
CFLAGS += -std=c17 $(OPT) -fno-strict-aliasing -pthread $(WARN)
CXXFLAGS += -std=c++17 $(OPT) -pthread $(WARNXX)
LDFLAGS += -pthread

.DEFAULT_GOAL := all
.DELETE_ON_ERROR:
.SUFFIXES:

# ---- rooms -----------------------------------------------------------------

PROTOS := $(wildcard proto/*.proto)
GEN_C := $(PROTOS:%.proto=$(BUILD)/gen/%.pb-c.c)
GEN_O := $(GEN_C:%.c=%.o)

objs = $(patsubst %,$(BUILD)/obj/%.o,$(basename $(1)))
MAINS := daemon/boostd.c daemon/boost-agent.c daemon/boost-keeper.c worker/boost-worker.c ctl/boostctl.c
sources = $(filter-out $(MAINS),$(foreach d,$(1),$(wildcard $(d)/*.c $(d)/*.cc)))

LIB = $(BUILD)/lib
$(LIB)/libproto.a:   $(GEN_O) $(call objs,$(call sources,proto proto/base))
$(LIB)/libplan.a:    $(call objs,$(call sources,worker/plan))
$(LIB)/libkernels.a: $(call objs,$(call sources,kernels kernels/cpu))
$(LIB)/libworker.a:  $(call objs,$(call sources,worker worker/comm))
$(LIB)/libstore.a:   $(call objs,$(call sources,store))
$(LIB)/libdaemon.a:  $(call objs,$(call sources,daemon))
$(LIB)/libctl.a:     $(call objs,$(call sources,ctl))

$(LIB)/%.a:
	@mkdir -p $(@D)
	@rm -f $@
	@$(AR) rcs $@ $^
	@echo "  AR   $@"

# What a program of each room links with, archives in dependency order.
L_PROTO   = $(LIB)/libproto.a
L_PLAN    = $(LIB)/libplan.a $(L_PROTO)
L_KERNELS = $(LIB)/libkernels.a $(L_PROTO)
L_WORKER  = $(LIB)/libworker.a $(LIB)/libkernels.a $(L_PLAN)
L_STORE   = $(LIB)/libstore.a $(L_PROTO)
L_DAEMON  = $(LIB)/libdaemon.a $(LIB)/libstore.a $(L_PLAN)
L_CTL     = $(LIB)/libctl.a $(L_PLAN)

S_PROTO   = -lprotobuf-c -ljansson -lm
S_KERNELS = -ldnnl -lgomp $(S_PROTO)
S_WORKER  = -lgloo -lstdc++ $(S_KERNELS)
S_STORE   = -lsqlite3 $(S_PROTO)
S_DAEMON  = -luv $(S_STORE)

# ---- programs --------------------------------------------------------------

PROGRAMS := $(foreach m,$(wildcard $(MAINS)),$(BUILD)/bin/$(notdir $(basename $(m))))
all: $(PROGRAMS) cuda

$(BUILD)/bin/boostd:       $(call objs,daemon/boostd.c) $(L_DAEMON)
$(BUILD)/bin/boost-agent:  $(call objs,daemon/boost-agent.c) $(L_DAEMON)
$(BUILD)/bin/boost-keeper: $(call objs,daemon/boost-keeper.c) $(L_DAEMON)
$(BUILD)/bin/boost-worker: $(call objs,worker/boost-worker.c) $(L_WORKER)
$(BUILD)/bin/boostctl:     $(call objs,ctl/boostctl.c) $(L_CTL)

$(BUILD)/bin/boostd $(BUILD)/bin/boost-agent $(BUILD)/bin/boost-keeper: LIBS = $(S_DAEMON)
$(BUILD)/bin/boost-worker: LIBS = $(S_WORKER)
$(BUILD)/bin/boostctl: LIBS = $(S_PROTO)

$(BUILD)/bin/%:
	@mkdir -p $(@D)
	@$(CC) $(LDFLAGS) -o $@ $^ $(LIBS)
	@echo "  LD   $@"

# ---- compiling -------------------------------------------------------------

.SECONDARY: $(GEN_C)
$(BUILD)/gen/%.pb-c.c: %.proto
	@mkdir -p $(@D)
	@$(PROTOC_C) --c_out=$(BUILD)/gen $<
	@echo "  GEN  $@"

$(BUILD)/gen/%.o: $(BUILD)/gen/%.c | $(GEN_C)
	@$(CC) $(CPPFLAGS) -std=c17 $(OPT) -c $< -o $@

$(BUILD)/obj/%.o: %.c | $(GEN_C)
	@mkdir -p $(@D)
	@$(CC) $(CPPFLAGS) $(CFLAGS) $(FILE_FLAGS) -MMD -MP -c $< -o $@
	@echo "  CC   $<"

$(BUILD)/obj/%.o: %.cc | $(GEN_C)
	@mkdir -p $(@D)
	@$(CXX) $(CPPFLAGS) $(CXXFLAGS) -MMD -MP -c $< -o $@
	@echo "  CXX  $<"

# The build id and version are in one object only, so that a commit does not rebuild all.
$(BUILD)/obj/proto/version.o: FILE_FLAGS = -DBOOST_VERSION='"$(VERSION)"' -DBOOST_COMMIT='"$(COMMIT)"'
$(BUILD)/obj/proto/version.o: $(BUILD)/commit
$(BUILD)/commit: FORCE
	@mkdir -p $(@D)
	@echo '$(COMMIT)' | cmp -s - $@ || echo '$(COMMIT)' > $@

# Element-wise and attention kernels are loops the compiler vectorises.
$(BUILD)/obj/kernels/cpu/%.o: OPT = -O3 -g
# The fp32 backend (and bf16 around it) shares OpenMP with oneDNN; what the last three allow is fused multiply-add, and no errno
# or trap from a vectorised sqrt or a masked comparison. None of them reorders a sum.
$(BUILD)/obj/kernels/cpu/fp32%.o $(BUILD)/obj/kernels/cpu/bf16%.o $(BUILD)/obj/kernels/cpu/bf16.o: FILE_FLAGS = -fopenmp -ffp-contract=fast -fno-math-errno -fno-trapping-math

# ---- CUDA ------------------------------------------------------------------

NVCC ?= $(firstword $(wildcard $(CUDA_HOME)/bin/nvcc) $(shell command -v nvcc 2>/dev/null))
CUDA_SOURCES := $(wildcard kernels/cuda/*.cu)
.PHONY: cuda
cuda:
ifeq ($(NVCC),)
	@echo "CUDA toolkit not found (no nvcc on PATH, CUDA_HOME unset): building for the CPU only"
else ifeq ($(CUDA_SOURCES),)
	@echo "CUDA toolkit found ($(NVCC)); this version has no CUDA sources yet: building for the CPU only"
else
	@$(MAKE) --no-print-directory cuda-objects
endif
.PHONY: cuda-objects
cuda-objects: $(CUDA_SOURCES:%.cu=$(BUILD)/obj/%.cu.o)
$(BUILD)/obj/%.cu.o: %.cu
	@mkdir -p $(@D)
	@$(NVCC) -std=c++17 -O3 -I. -I$(BUILD)/gen -arch=$(or $(CUDA_ARCH),sm_80) -c $< -o $@
	@echo "  NVCC $<"

# ---- tests -----------------------------------------------------------------
# tests/unit/<room>/*_test.c: one cmocka program each, linked with its room.

UNIT_SOURCES := $(wildcard tests/unit/*/*_test.c)
UNIT_TESTS := $(UNIT_SOURCES:tests/unit/%.c=$(BUILD)/tests/%)
TEST_SUPPORT := $(call objs,$(wildcard tests/unit/support/*.c))

define unit_room
$(filter $(BUILD)/tests/$(1)/%,$(UNIT_TESTS)): $(BUILD)/tests/$(1)/%: $(BUILD)/obj/tests/unit/$(1)/%.o $(TEST_SUPPORT) $(2)
	@mkdir -p $$(@D)
	@$$(CC) $$(LDFLAGS) -o $$@ $$^ -lcmocka $(3)
	@echo "  LD   $$@"
endef
$(eval $(call unit_room,proto,$(L_PROTO),$(S_PROTO)))
$(eval $(call unit_room,plan,$(L_PLAN),$(S_PROTO)))
$(eval $(call unit_room,kernels,$(L_KERNELS),$(S_KERNELS)))
$(eval $(call unit_room,worker,$(L_WORKER),$(S_WORKER)))
$(eval $(call unit_room,store,$(L_STORE),$(S_STORE)))
$(eval $(call unit_room,daemon,$(L_DAEMON),$(S_DAEMON)))
$(eval $(call unit_room,ctl,$(L_CTL),$(S_PROTO)))

# tests/issues/*_test.c: likewise, one for each reported failure, linked with the worker.
ISSUE_TESTS := $(patsubst tests/issues/%.c,$(BUILD)/tests/issues/%,$(wildcard tests/issues/*_test.c))
$(ISSUE_TESTS): $(BUILD)/tests/issues/%: $(BUILD)/obj/tests/issues/%.o $(L_WORKER)
	@mkdir -p $(@D)
	@$(CC) $(LDFLAGS) -o $@ $^ -lcmocka $(S_WORKER)
	@echo "  LD   $@"

# tests/bench/*.c: one program each, for tests/bench/run.py.
BENCHES := $(patsubst tests/bench/%.c,$(BUILD)/bench/%,$(wildcard tests/bench/*.c))
$(BENCHES): $(BUILD)/bench/%: $(BUILD)/obj/tests/bench/%.o $(L_WORKER)
	@mkdir -p $(@D)
	@$(CC) $(LDFLAGS) -o $@ $^ $(S_WORKER)
	@echo "  LD   $@"

.PHONY: all setup tests test test-full test-system soak bench demo lint clean FORCE
setup:
	@sh deploy/setup.sh
tests: $(UNIT_TESTS) $(ISSUE_TESTS)
test: setup
	@$(MAKE) --no-print-directory all tests
	@python3 tests/run.py --build $(BUILD)
test-full: setup
	@$(MAKE) --no-print-directory all tests
	@python3 tests/run.py --build $(BUILD) --full
test-system soak:
	@echo "make $@: nothing of this kind exists yet (the cluster work brings it)"; exit 2
demo: setup
	@$(MAKE) --no-print-directory all
	@BUILD=$(BUILD) sh deploy/demo.sh
bench: setup
	@$(MAKE) --no-print-directory all $(BENCHES)
	@python3 tests/bench/run.py --build $(BUILD)
lint:
	@sh tests/lint.sh
clean:
	rm -rf $(BUILD)

-include $(shell find $(BUILD)/obj -name '*.d' 2>/dev/null)
