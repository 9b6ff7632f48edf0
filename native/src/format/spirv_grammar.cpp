// The instructions that a kernel may have, with the SPIR-V specification's numbers
// (https://registry.khronos.org/SPIR-V/specs/unified1/SPIRV.html). What is not here is refused: whoever lets the compiler emit
// something new adds it here too, and what it must hold.

#include "format/spirv_module.h"

#include <algorithm>

namespace lapilli::spirv {

namespace {

constexpr Form forms[] = {
    {1, "TR", Rule::undefined},
    {5, "is"},  // OpName
    {6, "ins"}, // OpMemberName
    {op_extension, "s"},
    {op_import, "Rs"},
    {op_extended, "TRinV", Rule::extended},
    {op_memory_model, "nn"},
    {op_entry_point, "nisI"},
    {op_execution_mode, "inN"},
    {op_capability, "n"},
    {op_type_void, "R"},
    {op_type_bool, "R"},
    {op_type_int, "Rnn"},
    {op_type_float, "Rn?n"},
    {op_type_vector, "Rtn"},
    {op_type_image, "Rtnnnnnn"},
    {op_type_array, "Rtc"},
    {op_type_runtime_array, "Rt"},
    {op_type_struct, "RU"},
    {op_type_pointer, "Rnt"},
    {op_type_function, "RtU"},
    {op_constant_true, "TR", Rule::constant},
    {42, "TR", Rule::constant},
    {op_constant, "TRnN", Rule::constant},
    {op_constant_composite, "TRC", Rule::composite},
    {op_constant_null, "TR", Rule::undefined},
    {op_function, "TRnt"},
    {op_parameter, "TR"},
    {op_function_end, ""},
    {op_call, "TRfV", Rule::call},
    {op_variable, "TRn?c", Rule::variable},
    {op_load, "TRvx", Rule::load},
    {op_store, "vvx", Rule::store},
    {op_access_chain, "TRvV", Rule::access},
    {66, "TRvV", Rule::access}, // OpInBoundsAccessChain
    {op_array_length, "TRvn", Rule::length},
    {op_decorate, "inN"},
    {op_member_decorate, "innN"},
    {77, "TRvv", Rule::extract_dynamic},
    {78, "TRvvv", Rule::insert_dynamic},
    {79, "TRvvN", Rule::shuffle},
    {80, "TRV", Rule::construct},
    {81, "TRvN", Rule::extract},
    {82, "TRvvN", Rule::insert},
    {83, "TRv", Rule::copy},   // OpCopyObject
    {95, "TRvv", Rule::fetch}, // OpImageFetch
    {109, "TRv", Rule::convert},
    {110, "TRv", Rule::convert},
    {111, "TRv", Rule::convert},
    {112, "TRv", Rule::convert},
    {113, "TRv", Rule::convert},
    {114, "TRv", Rule::convert},
    {115, "TRv", Rule::convert},
    {116, "TRv", Rule::same}, // OpQuantizeToF16
    {124, "TRv", Rule::bitcast},
    {126, "TRv", Rule::integers}, // OpSNegate
    {127, "TRv", Rule::same},
    {128, "TRvv", Rule::integers},
    {129, "TRvv", Rule::same},
    {130, "TRvv", Rule::integers},
    {131, "TRvv", Rule::same},
    {132, "TRvv", Rule::integers},
    {133, "TRvv", Rule::same},
    {134, "TRvv", Rule::integers}, // OpUDiv
    {135, "TRvv", Rule::integers},
    {136, "TRvv", Rule::same},
    {137, "TRvv", Rule::integers},
    {138, "TRvv", Rule::integers},
    {139, "TRvv", Rule::integers},
    {140, "TRvv", Rule::same},
    {141, "TRvv", Rule::same},
    {142, "TRvv", Rule::scale},
    {148, "TRvv", Rule::dot},
    {149, "TRvv", Rule::extended_pair}, // OpIAddCarry and those after it
    {150, "TRvv", Rule::extended_pair},
    {151, "TRvv", Rule::extended_pair},
    {152, "TRvv", Rule::extended_pair},
    {154, "TRv", Rule::any_all},
    {155, "TRv", Rule::any_all},
    {156, "TRv", Rule::test_float},
    {157, "TRv", Rule::test_float},
    {164, "TRvv", Rule::logical},
    {165, "TRvv", Rule::logical},
    {166, "TRvv", Rule::logical},
    {167, "TRvv", Rule::logical},
    {168, "TRv", Rule::logical},
    {169, "TRvvv", Rule::select},
    {170, "TRvv", Rule::compare_int}, // OpIEqual
    {171, "TRvv", Rule::compare_int},
    {172, "TRvv", Rule::compare_int},
    {173, "TRvv", Rule::compare_int},
    {174, "TRvv", Rule::compare_int},
    {175, "TRvv", Rule::compare_int},
    {176, "TRvv", Rule::compare_int},
    {177, "TRvv", Rule::compare_int},
    {178, "TRvv", Rule::compare_int},
    {179, "TRvv", Rule::compare_int},
    {180, "TRvv", Rule::compare_float}, // OpFOrdEqual
    {181, "TRvv", Rule::compare_float},
    {182, "TRvv", Rule::compare_float},
    {183, "TRvv", Rule::compare_float},
    {184, "TRvv", Rule::compare_float},
    {185, "TRvv", Rule::compare_float},
    {186, "TRvv", Rule::compare_float},
    {187, "TRvv", Rule::compare_float},
    {188, "TRvv", Rule::compare_float},
    {189, "TRvv", Rule::compare_float},
    {190, "TRvv", Rule::compare_float},
    {191, "TRvv", Rule::compare_float},
    {194, "TRvv", Rule::shift},
    {195, "TRvv", Rule::shift},
    {196, "TRvv", Rule::shift},
    {197, "TRvv", Rule::integers},
    {198, "TRvv", Rule::integers},
    {199, "TRvv", Rule::integers},
    {200, "TRv", Rule::integers},
    {204, "TRv", Rule::integers}, // OpBitReverse
    {205, "TRv", Rule::integers}, // OpBitCount
    {224, "ccc", Rule::barrier},
    {225, "cc", Rule::barrier},
    {227, "TRvcc", Rule::atomic_load},
    {228, "vccv", Rule::atomic_store},
    {229, "TRvccv", Rule::atomic}, // OpAtomicExchange
    {230, "TRvcccvv", Rule::atomic_compare},
    {234, "TRvccv", Rule::atomic}, // OpAtomicIAdd
    {235, "TRvccv", Rule::atomic},
    {236, "TRvccv", Rule::atomic},
    {237, "TRvccv", Rule::atomic},
    {238, "TRvccv", Rule::atomic},
    {239, "TRvccv", Rule::atomic},
    {240, "TRvccv", Rule::atomic},
    {241, "TRvccv", Rule::atomic},
    {242, "TRvccv", Rule::atomic},
    {op_phi, "TRP"},
    {op_loop_merge, "llnN"},
    {op_selection_merge, "ln"},
    {op_label, "R"},
    {op_branch, "l"},
    {op_branch_conditional, "vllN"},
    {op_switch, "vlW"},
    {op_return, ""},
    {op_return_value, "v"},
    {op_unreachable, ""},
    {333, "TRc", Rule::elect}, // OpGroupNonUniformElect
    {334, "TRcv", Rule::vote},
    {335, "TRcv", Rule::vote},
    {337, "TRcvv", Rule::group_value},
    {338, "TRcv", Rule::group_value},
    {339, "TRcv", Rule::ballot},
    {345, "TRcvv", Rule::group_value}, // OpGroupNonUniformShuffle
    {346, "TRcvv", Rule::group_value},
    {347, "TRcvv", Rule::group_value},
    {348, "TRcvv", Rule::group_value},
    {349, "TRcnv?c", Rule::group_reduce}, // OpGroupNonUniformIAdd
    {350, "TRcnv?c", Rule::group_reduce},
    {351, "TRcnv?c", Rule::group_reduce},
    {352, "TRcnv?c", Rule::group_reduce},
    {353, "TRcnv?c", Rule::group_reduce},
    {354, "TRcnv?c", Rule::group_reduce},
    {355, "TRcnv?c", Rule::group_reduce},
    {356, "TRcnv?c", Rule::group_reduce},
    {357, "TRcnv?c", Rule::group_reduce},
    {358, "TRcnv?c", Rule::group_reduce},
    {359, "TRcnv?c", Rule::group_reduce},
    {360, "TRcnv?c", Rule::group_reduce},
    {361, "TRcnv?c", Rule::group_reduce},
    {365, "TRcvv", Rule::group_value}, // OpGroupNonUniformQuadBroadcast
    {366, "TRcvc", Rule::group_value},
    {400, "TRv", Rule::copy},            // OpCopyLogical
    {4450, "TRvv?n", Rule::integer_dot}, // OpSDot
    {4451, "TRvv?n", Rule::integer_dot},
    {4452, "TRvv?n", Rule::integer_dot},
    {4453, "TRvvv?n", Rule::integer_dot}, // OpSDotAccSat
    {4454, "TRvvv?n", Rule::integer_dot},
    {4455, "TRvvv?n", Rule::integer_dot},
    {op_type_matrix_khr, "Rtcccc"},
    {op_matrix_load, "TRvc?vx", Rule::matrix_load},
    {op_matrix_store, "vvc?vx", Rule::matrix_store},
    {4459, "TRvvv?n", Rule::matrix_multiply},
    {4460, "TRt", Rule::matrix_length},
};

static_assert(std::ranges::is_sorted(forms, {}, &Form::op));

} // namespace

const Form* find_form(uint32_t op) {
  const auto found = std::ranges::lower_bound(forms, op, {}, &Form::op);
  return found != std::end(forms) && found->op == op ? found : nullptr;
}

} // namespace lapilli::spirv
