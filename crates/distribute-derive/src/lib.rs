//! Derives for the arguments and results of distributed runs: `#[derive(ReplicaArgs, Structure)]`.
//!
//! The facade re-exports them, with examples, as `distribute::derive`; generated code names the traits through the
//! crate `distribute`.

use proc_macro::TokenStream;
use proc_macro2::Span;
use quote::quote;
use syn::{
    Data, DataStruct, DeriveInput, Error, Fields, GenericParam, Generics, Ident, Index, Member, Result, Type,
    parse_macro_input,
};

/// Implements `distribute::values::Structure`, so that runs can return the struct and `strategy.reduce` and `gather`
/// combine its values field by field.
///
/// Every field is a tensor, a number, or a nest of them.
#[proc_macro_derive(Structure)]
pub fn derive_structure(input: TokenStream) -> TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    structure(&input).unwrap_or_else(Error::into_compile_error).into()
}

/// Implements `distribute::strategy::ReplicaArgs`, so that the struct can be the arguments of a run. Each field whose
/// type is one of the struct's type parameters is split over the replicas, every other one is cloned for each.
#[proc_macro_derive(ReplicaArgs)]
pub fn derive_replica_args(input: TokenStream) -> TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    replica_args(&input).unwrap_or_else(Error::into_compile_error).into()
}

fn structure(input: &DeriveInput) -> Result<proc_macro2::TokenStream> {
    let (members, types) = fields(input, "Structure")?;
    let name = &input.ident;
    let marks: Vec<Ident> =
        (0..types.len()).map(|index| Ident::new(&format!("Mark{index}"), Span::call_site())).collect();
    let (_, own, predicates) = input.generics.split_for_impl();
    let predicates = predicates.map(|clause| clause.predicates.iter().collect::<Vec<_>>()).unwrap_or_default();
    let params = input.generics.params.iter().map(without_default);
    Ok(quote! {
        impl<#(#params,)* #(#marks),*> ::distribute::values::Structure<::distribute::values::Nested<(#(#marks,)*)>>
            for #name #own
        where
            #(#predicates,)*
            #(#types: ::distribute::values::Structure<#marks>,)*
        {
            fn combine(
                parts: &[&Self],
                leaves: &mut impl ::distribute::values::Leaves,
            ) -> ::distribute::values::Result<Self> {
                ::core::result::Result::Ok(Self {
                    #(#members: <#types as ::distribute::values::Structure<#marks>>::combine(
                        &parts.iter().map(|part| &part.#members).collect::<::std::vec::Vec<_>>(),
                        leaves,
                    )?,)*
                })
            }
        }
    })
}

fn replica_args(input: &DeriveInput) -> Result<proc_macro2::TokenStream> {
    let (members, types) = fields(input, "ReplicaArgs")?;
    let name = &input.ident;
    let parameters: Vec<&Ident> = input.generics.type_params().map(|parameter| &parameter.ident).collect();
    let is_split =
        |ty: &Type| matches!(ty, Type::Path(path) if path.path.get_ident().is_some_and(|ty| parameters.contains(&ty)));
    for parameter in &parameters {
        let bare = |ty: &Type| matches!(ty, Type::Path(path) if path.path.is_ident(*parameter));
        if !types.iter().any(bare) {
            let problem =
                "no field has this parameter as its type; fields to be split over replicas are of a type parameter";
            return Err(Error::new(parameter.span(), problem));
        }
    }
    let local = local_arguments(&input.generics);
    let (_, own, predicates) = input.generics.split_for_impl();
    let predicates = predicates.map(|clause| clause.predicates.iter().collect::<Vec<_>>()).unwrap_or_default();
    let params = input.generics.params.iter().map(without_default);
    let parts: Vec<Ident> = (0..types.len()).map(|at| Ident::new(&format!("part{at}"), Span::call_site())).collect();
    let splits = members.iter().zip(&types).zip(&parts).map(|((member, ty), part)| {
        if is_split(ty) {
            quote! {
                let mut #part = ::distribute::strategy::ReplicaArgs::split(self.#member, replicas)?.into_iter();
            }
        } else {
            quote! {
                let mut #part = ::std::iter::repeat_with(|| self.#member.clone());
            }
        }
    });
    let cloned = types.iter().filter(|ty| !is_split(ty));
    let split: Vec<&Member> =
        members.iter().zip(&types).filter(|(_, ty)| is_split(ty)).map(|(member, _)| member).collect();
    let found = parts.iter().map(|part| quote!(::core::option::Option::Some(#part)));
    let nexts = parts.iter().map(|part| quote!(#part.next()));
    Ok(quote! {
        impl<#(#params),*> ::distribute::strategy::ReplicaArgs for #name #own
        where
            #(#predicates,)*
            #(#parameters: ::distribute::strategy::ReplicaArgs,)*
            #(#cloned: ::core::clone::Clone + ::core::marker::Send,)*
        {
            type Local = #name #local;

            fn split(self, replicas: usize) -> ::distribute::strategy::Result<::std::vec::Vec<Self::Local>> {
                #(#splits)*
                let mut all = ::std::vec::Vec::with_capacity(replicas);
                while all.len() < replicas {
                    let (#(#found,)*) = (#(#nexts,)*) else { break };
                    all.push(#name { #(#members: #parts),* });
                }
                ::distribute::strategy::counted(all, replicas)
            }

            fn examples(&self, seen: &mut ::distribute::strategy::Examples) {
                #(::distribute::strategy::ReplicaArgs::examples(&self.#split, seen);)*
            }
        }
    })
}

/// Returns the struct's own arguments, with each type parameter replaced by one replica's part of it.
fn local_arguments(generics: &Generics) -> proc_macro2::TokenStream {
    let arguments = generics.params.iter().map(|parameter| match parameter {
        GenericParam::Type(parameter) => {
            let name = &parameter.ident;
            quote!(<#name as ::distribute::strategy::ReplicaArgs>::Local)
        }
        GenericParam::Lifetime(parameter) => {
            let lifetime = &parameter.lifetime;
            quote!(#lifetime)
        }
        GenericParam::Const(parameter) => {
            let name = &parameter.ident;
            quote!(#name)
        }
    });
    quote!(<#(#arguments),*>)
}

fn without_default(parameter: &GenericParam) -> GenericParam {
    let mut parameter = parameter.clone();
    match &mut parameter {
        GenericParam::Type(parameter) => parameter.default = None,
        GenericParam::Const(parameter) => parameter.default = None,
        GenericParam::Lifetime(_) => {}
    }
    parameter
}

fn fields(input: &DeriveInput, derived: &str) -> Result<(Vec<Member>, Vec<Type>)> {
    let Data::Struct(DataStruct { fields, .. }) = &input.data else {
        return Err(Error::new(input.ident.span(), format!("{derived} is derived for structs only")));
    };
    let members: Vec<Member> = match fields {
        Fields::Named(named) => named.named.iter().filter_map(|field| field.ident.clone()).map(Member::Named).collect(),
        _ => (0..fields.len()).map(|index| Member::Unnamed(Index::from(index))).collect(),
    };
    Ok((members, fields.iter().map(|field| field.ty.clone()).collect()))
}

// The examples of the README are tests of the crate.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
